//! The set of pages that the tree owns.

use crate::types::PageId;

const BITS: usize = u64::BITS as usize;

/// One bit per page id, and the number of set ones.
#[derive(Debug, Clone, Default)]
pub(crate) struct PageSet {
    words: Vec<u64>,
    len: usize,
}

impl PageSet {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn contains(&self, page: PageId) -> bool {
        let (word, bit) = Self::place(page);
        self.words.get(word).is_some_and(|bits| bits & bit != 0)
    }

    /// Adds a page; false if it was in the set.
    pub(crate) fn insert(&mut self, page: PageId) -> bool {
        let (word, bit) = Self::place(page);
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        let fresh = self.words[word] & bit == 0;
        self.words[word] |= bit;
        self.len += usize::from(fresh);
        fresh
    }

    /// Removes a page; false if it was not in the set.
    pub(crate) fn remove(&mut self, page: PageId) -> bool {
        let (word, bit) = Self::place(page);
        let Some(bits) = self.words.get_mut(word).filter(|bits| **bits & bit != 0) else {
            return false;
        };
        *bits &= !bit;
        self.len -= 1;
        true
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = PageId> {
        (0..).zip(&self.words).flat_map(|(word, &bits)| {
            (0..u64::BITS)
                .filter(move |bit| bits >> bit & 1 == 1)
                .map(move |bit| PageId(word * u64::BITS + bit))
        })
    }

    fn place(page: PageId) -> (usize, u64) {
        let page = page.0 as usize;
        (page / BITS, 1 << (page % BITS))
    }
}
