//! Checking every invariant of the tree.

use std::collections::BTreeSet;

use crate::arena::Node;
use crate::page_set::PageSet;
use crate::tree::RadixTree;
use crate::types::PageId;

/// An invariant that does not hold: a bug of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IntegrityError {
    /// Something is wrong at one node.
    #[error("node {node}: {reason}")]
    Node {
        /// Slot of the node.
        node: u32,
        /// What does not hold.
        reason: &'static str,
    },
    /// A page is at two places.
    #[error("page {} appears twice", .0.0)]
    RepeatedPage(PageId),
    /// A counter or index differs from a recount.
    #[error("{what}: the tree says {stored}, a recount {counted}")]
    Count {
        /// What is counted.
        what: &'static str,
        /// The number that is kept.
        stored: usize,
        /// The number found.
        counted: usize,
    },
}

impl RadixTree {
    /// Checks structure, order, locks, counters and the order of eviction, in time linear in the
    /// size of the tree.
    ///
    /// # Errors
    /// The first violation found.
    pub fn check_integrity(&self) -> Result<(), IntegrityError> {
        let mut pages = PageSet::default();
        let mut num_locked_pages = 0;
        let mut num_roots = 0;
        let mut num_linked = 0;
        let mut leaves = BTreeSet::new();
        for (index, node) in self.arena.iter() {
            let fail = |reason| Err(IntegrityError::Node { node: index, reason });
            let faults =
                if node.is_root() { self.root_fault(index) } else { self.edge_fault(node) };
            if let Some(reason) = faults.or_else(|| self.child_fault(index)) {
                return fail(reason);
            }
            if let Some(&page) = node.pages.iter().find(|&&page| !pages.insert(page)) {
                return Err(IntegrityError::RepeatedPage(page));
            }
            num_roots += usize::from(node.is_root());
            num_linked += node.children.len();
            num_locked_pages += if node.is_locked() { node.pages.len() } else { 0 };
            if node.is_evictable_leaf() {
                leaves.insert((node.last_access, index));
            }
        }
        let strays = self.owned.iter().filter(|&page| !pages.contains(page)).count();
        for (what, stored, counted) in [
            ("pages", self.num_pages(), pages.len()),
            ("owned pages without a node", 0, strays),
            ("locked pages", self.num_locked_pages, num_locked_pages),
            ("namespaces", self.roots.len(), num_roots),
            ("nodes that are a child or a root", self.arena.len(), num_linked + num_roots),
            ("leaves to evict", self.leaves.len(), leaves.len()),
            ("leaves in order", leaves.len(), self.leaves.intersection(&leaves).count()),
        ] {
            if stored != counted {
                return Err(IntegrityError::Count { what, stored, counted });
            }
        }
        Ok(())
    }

    fn root_fault(&self, index: u32) -> Option<&'static str> {
        let node = &self.arena[index];
        [
            (self.roots.get(&node.namespace) != Some(&index), "not the root of its namespace"),
            (node.children.is_empty(), "a root without children"),
            (
                !node.tokens.is_empty() || !node.pages.is_empty() || node.end != 0,
                "a root with pages",
            ),
            (node.locks > 0, "a root with a lock of its own"),
        ]
        .into_iter()
        .find_map(|(fault, reason)| fault.then_some(reason))
    }

    fn edge_fault(&self, node: &Node) -> Option<&'static str> {
        let parent = &self.arena[node.parent];
        let is_partial = !node.tokens.len().is_multiple_of(self.page_size);
        [
            (node.tokens.is_empty(), "an empty edge"),
            (
                node.pages.len() != node.tokens.len().div_ceil(self.page_size),
                "pages do not fit tokens",
            ),
            (is_partial && node.pages.len() != 1, "a partial page after whole ones"),
            (is_partial && !node.children.is_empty(), "a partial page with children"),
            (node.end != parent.end + node.tokens.len(), "wrong number of tokens from the root"),
            (node.namespace != parent.namespace, "another namespace than the parent's"),
            (node.last_access > self.clock, "used in the future"),
        ]
        .into_iter()
        .find_map(|(fault, reason)| fault.then_some(reason))
    }

    fn child_fault(&self, index: u32) -> Option<&'static str> {
        let node = &self.arena[index];
        let children = &node.children;
        let locked = children.iter().filter(|&&child| self.arena[child].is_locked()).count();
        [
            (
                children.iter().any(|&child| self.arena[child].parent != index),
                "a child of another parent",
            ),
            (
                !children
                    .is_sorted_by(|&left, &right| self.first_page(left) < self.first_page(right)),
                "children out of order, or two with equal first pages",
            ),
            (locked != node.locked_children as usize, "wrong number of locked children"),
        ]
        .into_iter()
        .find_map(|(fault, reason)| fault.then_some(reason))
    }
}
