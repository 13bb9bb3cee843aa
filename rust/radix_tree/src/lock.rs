//! Protecting paths that are in use.

use crate::error::RadixError;
use crate::tree::RadixTree;
use crate::types::NodeId;

impl RadixTree {
    /// Protects the pages that a node stands for, all the way to its root, until [`Self::unlock`]
    /// is called as often as this.
    ///
    /// Splits do not matter: the id stays right for unlocking.
    ///
    /// # Errors
    /// [`RadixError::StaleNode`].
    pub fn lock(&mut self, node: NodeId) -> Result<(), RadixError> {
        if node == NodeId::ROOT {
            return Ok(());
        }
        let index = self.resolve(node)?;
        self.unlist(index);
        let was_locked = self.arena[index].is_locked();
        self.arena[index].locks += 1;
        if !was_locked {
            self.begin_lock(index);
        }
        Ok(())
    }

    /// Takes back one [`Self::lock`] of a node.
    ///
    /// # Errors
    /// [`RadixError::NotLocked`]; [`RadixError::StaleNode`], which cannot happen to a node that is
    /// locked.
    pub fn unlock(&mut self, node: NodeId) -> Result<(), RadixError> {
        if node == NodeId::ROOT {
            return Ok(());
        }
        let index = self.resolve(node)?;
        let locks = &mut self.arena[index].locks;
        *locks = locks.checked_sub(1).ok_or(RadixError::NotLocked { node })?;
        if !self.arena[index].is_locked() {
            self.end_lock(index);
        }
        self.list(index);
        Ok(())
    }

    /// Tells the ancestors that a node is locked now, up to one that was locked before.
    fn begin_lock(&mut self, mut index: u32) {
        loop {
            let node = &self.arena[index];
            self.num_locked_pages += node.pages.len();
            if node.is_root() {
                return;
            }
            index = node.parent;
            let parent = &mut self.arena[index];
            let was_locked = parent.is_locked();
            parent.locked_children += 1;
            if was_locked {
                return;
            }
        }
    }

    /// Tells the ancestors that a node is no longer locked, up to one that is locked for another
    /// reason.
    fn end_lock(&mut self, mut index: u32) {
        loop {
            let node = &self.arena[index];
            self.num_locked_pages -= node.pages.len();
            if node.is_root() {
                return;
            }
            index = node.parent;
            let parent = &mut self.arena[index];
            parent.locked_children -= 1;
            if parent.is_locked() {
                return;
            }
        }
    }

    pub(crate) fn resolve(&self, node: NodeId) -> Result<u32, RadixError> {
        self.arena.resolve(node).ok_or(RadixError::StaleNode { node })
    }
}
