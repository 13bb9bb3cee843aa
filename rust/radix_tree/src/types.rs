//! The values that the tree's methods take and return.

/// A page of the KV pool. The tree only stores and compares it.
///
/// The tree keeps one bit per possible id up to the largest that it has seen, so ids should be pool
/// indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct PageId(pub u32);

/// A separate root: sequences of different namespaces never share pages.
///
/// The caller chooses the numbers. A namespace comes into being with its first page and costs
/// nothing once its last page has left the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct NamespaceId(pub u32);

/// A node of the tree: it stands for the run of whole pages from its root down to the end of its
/// edge (or for those and one partial page).
///
/// An id is valid as long as every page that it stands for is in the tree, and never means anything
/// else afterwards: using it then is [`crate::RadixError::StaleNode`]. When a node is split, the
/// lower part keeps the id, so that the id goes on standing for the same pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NodeId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl NodeId {
    /// The root of any namespace: it stands for no page, is always valid, and locking it does
    /// nothing.
    pub const ROOT: Self = Self { index: u32::MAX, generation: 0 };
}

/// The longest cached prefix of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// The node that stands for exactly `pages`: locking it protects these and nothing else.
    /// [`NodeId::ROOT`] if there are none.
    pub node: NodeId,
    /// The shared whole pages, in order.
    pub pages: Vec<PageId>,
    /// Where to copy the tokens after `pages` from, if the match ends inside a page.
    pub donor: Option<Donor>,
    /// Length of the match in tokens: `pages.len() * page_size`, plus the donor's tokens.
    pub num_tokens: usize,
}

/// A page whose leading tokens continue a match, to be copied into a fresh page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Donor {
    /// The node that ends with the donor page: locking it protects the donor page and its path.
    pub node: NodeId,
    /// The page to copy from.
    pub page: PageId,
    /// How many of its leading tokens are those of the key: at least 1, less than `page_size`.
    pub num_tokens: u32,
}

/// The measure of a match, and what it takes to know whether it still holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peek {
    /// What [`Match::num_tokens`] would be.
    pub num_tokens: usize,
    /// Pass it to [`crate::RadixTree::is_current`] or [`crate::RadixTree::refresh`].
    pub watch: Watch,
}

/// The place in the tree on which a measured match depends.
///
/// It goes stale when a page that could lengthen or shorten that match enters or leaves, and hardly
/// ever otherwise: inserts and evictions elsewhere, even below the same node, do not touch it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watch {
    /// Slot of the node whose version stands for the watched place, or `NIL` while the namespace
    /// has no root.
    pub(crate) slot: u32,
    /// Version of that slot (or number of roots ever made) at the time of the match.
    pub(crate) version: u64,
    /// The deepest wholly matched node, from which a refresh resumes.
    pub(crate) anchor: NodeId,
}

/// What became of the pages handed to [`crate::RadixTree::insert`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inserted {
    /// The deepest node of the key: locking it protects all of the key's pages in the tree, except
    /// a partial last page that was not taken because a longer page holds its tokens
    /// ([`PageOutcome::Duplicate`]).
    pub node: NodeId,
    /// One entry per page handed in, in order.
    pub outcomes: Vec<PageOutcome>,
    /// Partial pages that left the tree because the key holds their tokens and more. The caller
    /// owns them again.
    pub freed: Vec<PageId>,
}

/// What became of one page handed to [`crate::RadixTree::insert`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageOutcome {
    /// New: the tree owns it from now on.
    Adopted,
    /// The tree owned this very page before: the caller must not free it.
    Present,
    /// The tree holds the page's tokens in another page: the caller still owns its own.
    Duplicate {
        /// The tree's page, whose leading tokens are those of the caller's.
        tree_page: PageId,
    },
}
