//! What a caller can do wrong.

use crate::types::{NodeId, PageId};

/// A call that the tree refuses. What it holds and protects is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RadixError {
    /// The number of pages does not fit the number of tokens.
    #[error("{num_tokens} tokens at page size {page_size} need {needed} pages, {given} were given")]
    PageCount {
        /// Tokens in the key.
        num_tokens: usize,
        /// Tokens per page.
        page_size: usize,
        /// Pages that the key needs.
        needed: usize,
        /// Pages in the call.
        given: usize,
    },
    /// A page that is already somewhere in the tree (or twice in the call) was inserted at another
    /// position.
    #[error("page {} is already in the tree at another position", .0.0)]
    PageInUse(PageId),
    /// The node has been evicted, replaced or cleared.
    #[error("node {node:?} is no longer in the tree; match again and lock what must stay")]
    StaleNode {
        /// The id that was passed.
        node: NodeId,
    },
    /// The node was unlocked more often than locked.
    #[error("node {node:?} is not locked")]
    NotLocked {
        /// The id that was passed.
        node: NodeId,
    },
    /// A partial page has no room for pages below it.
    #[error("node {node:?} ends in a partial page; insert below its parent")]
    PartialNode {
        /// The id that was passed.
        node: NodeId,
    },
    /// The tree cannot be cleared while pages are in use.
    #[error("{num_locked_pages} pages are locked; unlock them before clearing the tree")]
    Locked {
        /// Pages on locked paths.
        num_locked_pages: usize,
    },
}
