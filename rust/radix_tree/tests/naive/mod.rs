//! The prefix cache as a plain list of pages, each with all the tokens from the root to its end:
//! slow and obvious.

use radix_tree::{NamespaceId, PageId, PageOutcome};

/// One page of the cache.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    /// Never given twice, so that it tells a page from a later one at the same place.
    pub(crate) serial: u64,
    pub(crate) namespace: NamespaceId,
    /// Tokens from the root to the page's last.
    pub(crate) prefix: Vec<u32>,
    pub(crate) page: PageId,
    pub(crate) last_access: u64,
    pub(crate) locks: u32,
}

#[derive(Debug)]
pub(crate) struct Naive {
    page_size: usize,
    pub(crate) entries: Vec<Entry>,
    clock: u64,
    num_made: u64,
}

/// What a match must be.
#[derive(Debug)]
pub(crate) struct Longest {
    /// The whole pages, in order.
    pub(crate) path: Vec<Entry>,
    /// Tokens that the best donors share with the key after the path.
    pub(crate) donated: usize,
    /// Every page that shares that many.
    pub(crate) donors: Vec<Entry>,
}

/// What an insert must do.
#[derive(Debug)]
pub(crate) struct Expected {
    pub(crate) outcomes: Vec<PageOutcome>,
    pub(crate) freed: Vec<PageId>,
    /// The pages that the resulting node stands for.
    pub(crate) path: Vec<u64>,
}

impl Naive {
    pub(crate) fn new(page_size: usize) -> Self {
        Self { page_size, entries: Vec::new(), clock: 0, num_made: 0 }
    }

    pub(crate) fn num_locked(&self) -> usize {
        self.entries.iter().filter(|entry| entry.locks > 0).count()
    }

    pub(crate) fn is_alive(&self, serial: u64) -> bool {
        self.entries.iter().any(|entry| entry.serial == serial)
    }

    pub(crate) fn owns(&self, page: PageId) -> bool {
        self.entries.iter().any(|entry| entry.page == page)
    }

    /// Pages in the place of the last page of `prefix` that hold at least its tokens.
    pub(crate) fn holders(&self, namespace: NamespaceId, prefix: &[u32]) -> Vec<&Entry> {
        let slot_end = prefix.len().div_ceil(self.page_size) * self.page_size;
        self.entries
            .iter()
            .filter(|entry| entry.namespace == namespace)
            .filter(|entry| entry.prefix.len() <= slot_end && entry.prefix.starts_with(prefix))
            .collect()
    }

    /// Partial pages in the place of the last page of `prefix` that hold only some of its tokens.
    pub(crate) fn partial_prefixes(&self, namespace: NamespaceId, prefix: &[u32]) -> Vec<&Entry> {
        let slot_begin = (prefix.len() - 1) / self.page_size * self.page_size;
        self.entries
            .iter()
            .filter(|entry| entry.namespace == namespace && entry.prefix.len() < prefix.len())
            .filter(|entry| entry.prefix.len() > slot_begin && prefix.starts_with(&entry.prefix))
            .collect()
    }

    pub(crate) fn longest(&self, namespace: NamespaceId, key: &[u32]) -> Longest {
        let mut path = Vec::new();
        for end in (self.page_size..=key.len()).step_by(self.page_size) {
            match self.holders(namespace, &key[..end])[..] {
                [] => break,
                [only] => path.push(only.clone()),
                _ => panic!("two pages with equal tokens"),
            }
        }
        let begin = path.len() * self.page_size;
        let shares = |entry: &Entry| {
            let in_place = entry.namespace == namespace
                && entry.prefix.len() > begin
                && entry.prefix.len() <= begin + self.page_size
                && entry.prefix[..begin] == key[..begin];
            let pairs = entry.prefix[begin.min(entry.prefix.len())..].iter().zip(&key[begin..]);
            if in_place { pairs.take_while(|(a, b)| a == b).count() } else { 0 }
        };
        let donated = self.entries.iter().map(shares).max().unwrap_or(0);
        let donors = self
            .entries
            .iter()
            .filter(|&entry| donated > 0 && shares(entry) == donated)
            .cloned()
            .collect();
        Longest { path, donated, donors }
    }

    /// Marks pages as used by one operation.
    pub(crate) fn touch(&mut self, serials: &[u64]) {
        self.clock += 1;
        for entry in &mut self.entries {
            if serials.contains(&entry.serial) {
                entry.last_access = self.clock;
            }
        }
    }

    pub(crate) fn lock(&mut self, serials: &[u64]) {
        for entry in &mut self.entries {
            entry.locks += u32::from(serials.contains(&entry.serial));
        }
    }

    pub(crate) fn unlock(&mut self, serials: &[u64]) {
        for entry in &mut self.entries {
            entry.locks -= u32::from(serials.contains(&entry.serial));
        }
    }

    /// Inserts, or returns the page that must be refused.
    pub(crate) fn insert(
        &mut self,
        namespace: NamespaceId,
        key: &[u32],
        pages: &[PageId],
    ) -> Result<Expected, PageId> {
        let mut expected = Expected { outcomes: Vec::new(), freed: Vec::new(), path: Vec::new() };
        for (index, &page) in pages.iter().enumerate() {
            let prefix = &key[..key.len().min((index + 1) * self.page_size)];
            let holders = self.holders(namespace, prefix);
            let Some(holder) = holders.first() else { break };
            expected.outcomes.push(if self.owns(page) {
                PageOutcome::Present
            } else {
                PageOutcome::Duplicate { tree_page: holder.page }
            });
            let equal = holders.iter().find(|holder| holder.prefix.len() == prefix.len());
            expected.path.extend(equal.map(|entry| entry.serial));
        }
        let num_known = expected.outcomes.len();
        if num_known < pages.len() {
            self.add(namespace, key, pages, num_known, &mut expected)?;
        }
        self.touch(&expected.path);
        Ok(expected)
    }

    fn add(
        &mut self,
        namespace: NamespaceId,
        key: &[u32],
        pages: &[PageId],
        num_known: usize,
        expected: &mut Expected,
    ) -> Result<(), PageId> {
        let end_of = |index: usize| key.len().min((index + 1) * self.page_size);
        let first = &key[..end_of(num_known)];
        let prefixes: Vec<Entry> =
            self.partial_prefixes(namespace, first).into_iter().cloned().collect();
        let grown = prefixes.iter().find(|entry| entry.page == pages[num_known]);
        let fresh = num_known + usize::from(grown.is_some());
        for (index, &page) in pages.iter().enumerate().skip(fresh) {
            if self.owns(page) || pages[fresh..index].contains(&page) {
                return Err(page);
            }
        }
        if let Some(grown) = grown {
            let entry = self.entries.iter_mut().find(|entry| entry.serial == grown.serial);
            entry.expect("the entry was just found").prefix = first.to_vec();
            expected.path.push(grown.serial);
        }
        for prefix in prefixes.iter().filter(|prefix| prefix.locks == 0) {
            if grown.is_none_or(|grown| grown.serial != prefix.serial) {
                expected.freed.push(prefix.page);
                self.entries.retain(|entry| entry.serial != prefix.serial);
            }
        }
        for index in fresh..pages.len() {
            self.num_made += 1;
            self.entries.push(Entry {
                serial: self.num_made,
                namespace,
                prefix: key[..end_of(index)].to_vec(),
                page: pages[index],
                last_access: 0,
                locks: 0,
            });
            expected.path.push(self.num_made);
        }
        expected.outcomes.resize(pages.len(), PageOutcome::Adopted);
        Ok(())
    }

    /// Evicts one page after another: the least recently used of those that nothing follows and
    /// nobody locks.
    pub(crate) fn evict(&mut self, num_pages: usize) -> Vec<PageId> {
        let mut out = Vec::new();
        while out.len() < num_pages {
            let victim = (0..self.entries.len())
                .filter(|&index| self.entries[index].locks == 0 && !self.has_child(index))
                .min_by_key(|&index| self.entries[index].last_access);
            let Some(victim) = victim else { break };
            out.push(self.entries.swap_remove(victim).page);
        }
        out
    }

    fn has_child(&self, index: usize) -> bool {
        let parent = &self.entries[index];
        let is_whole = parent.prefix.len().is_multiple_of(self.page_size);
        is_whole
            && self.entries.iter().any(|entry| {
                entry.namespace == parent.namespace
                    && entry.prefix.len() > parent.prefix.len()
                    && entry.prefix.starts_with(&parent.prefix)
            })
    }
}
