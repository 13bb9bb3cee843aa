//! Taking pages out of the tree.

use crate::arena::Node;
use crate::error::RadixError;
use crate::tree::RadixTree;
use crate::types::PageId;

impl RadixTree {
    /// Frees up to `num_pages` unlocked pages, the least recently used first, and never a page
    /// before those that follow it. The pages are appended to `out` and belong to the caller again;
    /// returns how many there were. Fewer than asked means that everything left is locked.
    ///
    /// A page is used by each match or insert whose path or donor it is on. Costs O(log n) per
    /// node.
    pub fn evict(&mut self, num_pages: usize, out: &mut Vec<PageId>) -> usize {
        let mut num_freed = 0;
        while num_freed < num_pages {
            let Some(&(_, leaf)) = self.leaves.first() else { break };
            let wanted = num_pages - num_freed;
            let available = self.arena[leaf].pages.len();
            if available <= wanted {
                out.extend(self.remove_leaf(leaf).pages.into_iter().rev());
            } else {
                self.trim(leaf, wanted, out);
            }
            num_freed += available.min(wanted);
        }
        num_freed
    }

    /// Empties the tree and returns all its pages. Every node id and watch goes stale.
    ///
    /// # Errors
    /// [`RadixError::Locked`] while anything is locked.
    pub fn clear(&mut self) -> Result<Vec<PageId>, RadixError> {
        if self.num_locked_pages > 0 {
            return Err(RadixError::Locked { num_locked_pages: self.num_locked_pages });
        }
        let mut pages = Vec::with_capacity(self.num_pages());
        self.evict(usize::MAX, &mut pages);
        Ok(pages)
    }

    /// Takes pages off the end of an unlocked leaf, leaving at least one.
    fn trim(&mut self, leaf: u32, num_pages: usize, out: &mut Vec<PageId>) {
        let node = &mut self.arena[leaf];
        let num_left = node.pages.len() - num_pages;
        for page in node.pages.drain(num_left..).rev() {
            let removed = self.owned.remove(page);
            debug_assert!(removed, "broken invariant: the pages of nodes are the tree's");
            out.push(page);
        }
        // Ids of the node stood for more than is left, and matches that ended in it are shorter
        // now.
        node.end -= num_pages * self.page_size;
        node.tokens.truncate(num_left * self.page_size);
        self.arena.retire_id(leaf);
        self.arena.bump(leaf);
    }

    /// Removes an unlocked leaf. Its parent inherits its last use and may become the next leaf to
    /// go; a root without children goes with it.
    pub(crate) fn remove_leaf(&mut self, leaf: u32) -> Node {
        self.unlist(leaf);
        self.unlink(leaf);
        let node = self.arena.remove(leaf);
        for &page in &node.pages {
            let removed = self.owned.remove(page);
            debug_assert!(removed, "broken invariant: the pages of nodes are the tree's");
        }
        let parent = &mut self.arena[node.parent];
        parent.last_access = parent.last_access.max(node.last_access);
        self.list(node.parent);
        self.drop_empty_root(node.parent);
        node
    }

    /// Removes a root that has no children; does nothing to other nodes.
    pub(crate) fn drop_empty_root(&mut self, index: u32) {
        let node = &self.arena[index];
        if node.is_root() && node.children.is_empty() {
            self.roots.remove(&node.namespace);
            self.arena.remove(index);
        }
    }
}
