//! Numbers for the namespaces of the prefix tree.
//!
//! A namespace is a name under one weight epoch. It has a number while a sequence uses it or a page
//! of it is in the tree, so that names made up per request do not pile up.

use radix_tree::{NamespaceId, PageId};
use rustc_hash::FxHashMap;

#[derive(Debug, Default)]
pub(crate) struct Namespaces {
    epoch: u64,
    entries: Vec<Entry>,
    free: Vec<u32>,
    /// Names of the current epoch.
    by_name: FxHashMap<String, u32>,
    /// Namespace of every page that is in the tree.
    of_page: Vec<u32>,
}

#[derive(Debug, Default)]
struct Entry {
    name: String,
    epoch: u64,
    users: u32,
    pages: u32,
}

impl Namespaces {
    pub(crate) fn new(num_pages: u32) -> Self {
        Self { of_page: vec![0; num_pages as usize], ..Self::default() }
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Starts another epoch: numbers given out before are no longer current.
    pub(crate) fn set_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
        self.by_name.clear();
    }

    /// The current number of a name, held until `leave`.
    pub(crate) fn enter(&mut self, name: &str) -> NamespaceId {
        if let Some(&index) = self.by_name.get(name) {
            self.entries[index as usize].users += 1;
            return NamespaceId(index);
        }
        let entry = Entry { name: name.to_owned(), epoch: self.epoch, users: 1, pages: 0 };
        let index = if let Some(index) = self.free.pop() {
            self.entries[index as usize] = entry;
            index
        } else {
            self.entries.push(entry);
            self.entries.len() as u32 - 1
        };
        self.by_name.insert(name.to_owned(), index);
        NamespaceId(index)
    }

    pub(crate) fn leave(&mut self, namespace: NamespaceId) {
        self.entries[namespace.0 as usize].users -= 1;
        self.drop_unused(namespace.0);
    }

    /// Whether the number was given out under the current epoch.
    pub(crate) fn is_current(&self, namespace: NamespaceId) -> bool {
        self.entries[namespace.0 as usize].epoch == self.epoch
    }

    pub(crate) fn page_joins(&mut self, namespace: NamespaceId, page: PageId) {
        self.of_page[page.0 as usize] = namespace.0;
        self.entries[namespace.0 as usize].pages += 1;
    }

    pub(crate) fn page_leaves(&mut self, page: PageId) {
        let index = self.of_page[page.0 as usize];
        self.entries[index as usize].pages -= 1;
        self.drop_unused(index);
    }

    fn drop_unused(&mut self, index: u32) {
        let entry = &mut self.entries[index as usize];
        if entry.users == 0 && entry.pages == 0 {
            if entry.epoch == self.epoch {
                self.by_name.remove(&entry.name);
            }
            *entry = Entry::default();
            self.free.push(index);
        }
    }
}
