//! The KV pool: which pages are free, cached in the prefix tree, or private to a sequence.
//!
//! Every page but page 0 is in exactly one of: the free list, the tree, one sequence's private
//! pages, or the retiring list (freed, but named by a step in flight). Nothing here knows requests
//! or when a sequence may have memory.

use std::collections::VecDeque;

use radix_tree::{Donor, NamespaceId, NodeId, PageId, PageOutcome, Peek, RadixTree};

use crate::config::Config;
use crate::namespaces::Namespaces;

/// The KV pages of one sequence, in order of position.
#[derive(Debug)]
pub(crate) struct Kv {
    pub(crate) pages: Vec<PageId>,
    /// How many leading pages the tree owns; they are locked through `node`.
    shared: u32,
    node: NodeId,
    /// Leading pages that the device's page table already has.
    pub(crate) written: u32,
    /// Earlier entries of the page table that have changed since they were written.
    pub(crate) rewritten: Vec<u32>,
}

impl Kv {
    pub(crate) fn empty() -> Self {
        Self { pages: Vec::new(), shared: 0, node: NodeId::ROOT, written: 0, rewritten: Vec::new() }
    }

    /// Pages that the tree owns.
    pub(crate) fn shared_pages(&self) -> &[PageId] {
        &self.pages[..self.shared as usize]
    }

    /// Pages that only this sequence has.
    pub(crate) fn private_pages(&self) -> &[PageId] {
        &self.pages[self.shared as usize..]
    }
}

/// What a sequence wants to enter memory with.
pub(crate) struct Claim<'a> {
    pub(crate) namespace: NamespaceId,
    /// Tokens that may come from the cache.
    pub(crate) key: &'a [u32],
    /// Pages that the sequence needs altogether.
    pub(crate) total_pages: u32,
    /// Pages that must be left over.
    pub(crate) reserve_pages: u64,
}

/// What a sequence entered memory with.
#[derive(Debug)]
pub(crate) struct Granted {
    pub(crate) kv: Kv,
    /// Leading tokens whose KV is there, the donor's included.
    pub(crate) cached_tokens: u32,
    /// The page to copy from into the first private page. Its node is locked: `unlock` it when the
    /// step that copies is committed.
    pub(crate) donor: Option<Donor>,
}

const LOCKED: &str = "broken invariant: a locked node is in the tree";

#[derive(Debug)]
pub(crate) struct Memory {
    page_size: u32,
    num_pages: u32,
    prefix_cache: bool,
    tree: RadixTree,
    free: Vec<PageId>,
    /// Pages to free once the step is committed, in order of steps.
    retiring: VecDeque<(u64, PageId)>,
    pub(crate) namespaces: Namespaces,
    evicted_pages: u64,
    scratch: Vec<PageId>,
}

impl Memory {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            page_size: config.page_size,
            num_pages: config.num_pages,
            prefix_cache: config.prefix_cache,
            tree: RadixTree::new(config.page_size as usize),
            free: (1..config.num_pages).rev().map(PageId).collect(),
            retiring: VecDeque::new(),
            namespaces: Namespaces::new(config.num_pages),
            evicted_pages: 0,
            scratch: Vec::new(),
        }
    }

    /// Pages that could be allocated now.
    pub(crate) fn available_pages(&self) -> u64 {
        (self.free.len() + self.tree.num_evictable_pages()) as u64
    }

    pub(crate) fn free_pages(&self) -> usize {
        self.free.len()
    }

    pub(crate) fn evictable_pages(&self) -> usize {
        self.tree.num_evictable_pages()
    }

    pub(crate) fn evicted_tokens(&self) -> u64 {
        self.evicted_pages * u64::from(self.page_size)
    }

    /// Measures the cached prefix of `key`.
    pub(crate) fn peek(&self, namespace: NamespaceId, key: &[u32]) -> Peek {
        self.tree.peek(namespace, key)
    }

    /// Whether a measured prefix still has its length.
    pub(crate) fn is_current(&self, peek: &Peek) -> bool {
        self.tree.is_current(peek.watch)
    }

    /// Measures a prefix again.
    pub(crate) fn refresh(&self, namespace: NamespaceId, key: &[u32], peek: &mut Peek) {
        self.tree.refresh(namespace, key, peek);
    }

    /// Gives a sequence its pages: the cached prefix of its key and fresh ones for the rest.
    ///
    /// Returns `None`, and changes nothing but the order of eviction, if that and the reserve are not
    /// available.
    pub(crate) fn admit(&mut self, claim: &Claim) -> Option<Granted> {
        let matched = self.tree.match_prefix(claim.namespace, claim.key);
        let fresh = claim.total_pages - matched.pages.len() as u32;
        let needed = u64::from(fresh) + claim.reserve_pages;
        self.lock(matched.node);
        let donor = matched.donor.filter(|donor| {
            self.lock(donor.node);
            let fits = self.available_pages() >= needed;
            if !fits {
                self.unlock(donor.node);
            }
            fits
        });
        if self.available_pages() < needed {
            self.unlock(matched.node);
            return None;
        }
        let shared = matched.pages.len() as u32;
        let mut kv =
            Kv { pages: matched.pages, shared, node: matched.node, written: 0, rewritten: vec![] };
        let allocated = self.allocate(fresh as usize, &mut kv.pages);
        assert!(allocated, "broken invariant: available pages can be allocated");
        let cached_tokens = shared * self.page_size + donor.map_or(0, |donor| donor.num_tokens);
        Some(Granted { kv, cached_tokens, donor })
    }

    /// Appends `count` fresh pages to `out`, evicting cached ones if it must; false if it cannot.
    pub(crate) fn allocate(&mut self, count: usize, out: &mut Vec<PageId>) -> bool {
        if self.free.len() < count {
            self.evict(count - self.free.len());
        }
        let Some(rest) = self.free.len().checked_sub(count) else { return false };
        out.extend(self.free.drain(rest..).rev());
        true
    }

    /// Shares the sequence's whole pages of `tokens`, which are those computed and committed.
    ///
    /// Where the tree holds the same tokens in another page, the sequence moves to that page
    /// (`rewritten`), and its own is free once step `last_step` is committed.
    pub(crate) fn publish(
        &mut self,
        namespace: NamespaceId,
        kv: &mut Kv,
        tokens: &[u32],
        last_step: u64,
    ) {
        let whole = tokens.len() as u32 / self.page_size;
        if !self.keeps(namespace) || whole <= kv.shared {
            return;
        }
        let (first, end) = (kv.shared as usize, whole as usize);
        let tail = &tokens[first * self.page_size as usize..end * self.page_size as usize];
        let inserted = self
            .tree
            .insert_below(namespace, kv.node, tail, &kv.pages[first..end])
            .expect("broken invariant: a sequence's private pages are not in the tree");
        for (outcome, index) in inserted.outcomes.into_iter().zip(first..) {
            match outcome {
                PageOutcome::Adopted => self.namespaces.page_joins(namespace, kv.pages[index]),
                PageOutcome::Duplicate { tree_page } => {
                    let own = std::mem::replace(&mut kv.pages[index], tree_page);
                    self.retiring.push_back((last_step, own));
                    if index < kv.written as usize {
                        kv.rewritten.push(index as u32);
                    }
                }
                PageOutcome::Present => unreachable!("private pages are not in the tree"),
            }
        }
        self.take_back(inserted.freed);
        self.lock(inserted.node);
        self.unlock(kv.node);
        kv.node = inserted.node;
        kv.shared = whole;
    }

    /// Takes a sequence's pages away. No step in flight may name them.
    ///
    /// With `tokens`, those computed and committed, the pages that hold them stay in the tree.
    pub(crate) fn release(&mut self, namespace: NamespaceId, kv: &mut Kv, tokens: &[u32]) {
        let used = tokens.len().div_ceil(self.page_size as usize);
        let first = kv.shared as usize;
        let kept = if self.keeps(namespace) { used.max(first) } else { first };
        if kept > first {
            let tail = &tokens[first * self.page_size as usize..];
            let inserted = self
                .tree
                .insert_below(namespace, kv.node, tail, &kv.pages[first..kept])
                .expect("broken invariant: a sequence's private pages are not in the tree");
            for (outcome, &page) in inserted.outcomes.iter().zip(&kv.pages[first..kept]) {
                match outcome {
                    PageOutcome::Adopted => self.namespaces.page_joins(namespace, page),
                    PageOutcome::Duplicate { .. } => self.free.push(page),
                    PageOutcome::Present => unreachable!("private pages are not in the tree"),
                }
            }
            self.take_back(inserted.freed);
        }
        self.free.extend(kv.pages[kept..].iter().rev());
        self.unlock(kv.node);
        *kv = Kv::empty();
    }

    /// Ends the protection of a donor.
    pub(crate) fn unlock(&mut self, node: NodeId) {
        self.tree.unlock(node).expect(LOCKED);
    }

    /// Frees what only steps up to this one named.
    pub(crate) fn step_committed(&mut self, step: u64) {
        while let Some(&(last_step, page)) = self.retiring.front()
            && last_step <= step
        {
            self.retiring.pop_front();
            self.free.push(page);
        }
    }

    /// Empties the tree of all that no sequence uses.
    pub(crate) fn forget_unused(&mut self) {
        let mut pages = std::mem::take(&mut self.scratch);
        self.tree.evict(usize::MAX, &mut pages);
        self.take_back(pages.drain(..));
        self.scratch = pages;
    }

    fn evict(&mut self, count: usize) {
        let mut pages = std::mem::take(&mut self.scratch);
        self.evicted_pages += self.tree.evict(count, &mut pages) as u64;
        self.take_back(pages.drain(..));
        self.scratch = pages;
    }

    /// Takes pages that have left the tree.
    fn take_back(&mut self, pages: impl IntoIterator<Item = PageId>) {
        for page in pages {
            self.namespaces.page_leaves(page);
            self.free.push(page);
        }
    }

    fn keeps(&self, namespace: NamespaceId) -> bool {
        self.prefix_cache && self.namespaces.is_current(namespace)
    }

    fn lock(&mut self, node: NodeId) {
        self.tree.lock(node).expect(LOCKED);
    }
}

impl Memory {
    /// Checks that every page has exactly one owner and that exactly `locked` pages are locked.
    pub(crate) fn check<'a>(
        &self,
        private: impl Iterator<Item = &'a PageId>,
        locked: impl Iterator<Item = &'a PageId>,
    ) -> Result<(), String> {
        self.tree.check_integrity().map_err(|error| error.to_string())?;
        let mut owner: Vec<Option<&str>> = vec![None; self.num_pages as usize];
        owner[0] = Some("reserved");
        let mut own = |page: PageId, new: &'static str| match owner
            .get_mut(page.0 as usize)
            .ok_or_else(|| format!("page {} is not in the pool", page.0))?
            .replace(new)
        {
            None => Ok(()),
            Some(old) => Err(format!("page {} is both {old} and {new}", page.0)),
        };
        self.free.iter().try_for_each(|&page| own(page, "free"))?;
        self.retiring.iter().try_for_each(|&(_, page)| own(page, "retiring"))?;
        self.tree.pages().try_for_each(|page| own(page, "cached"))?;
        for &page in private {
            own(page, "private")?;
        }
        if let Some(page) = owner.iter().position(Option::is_none) {
            return Err(format!("page {page} has no owner"));
        }
        let mut pages: Vec<PageId> = locked.copied().collect();
        pages.sort_unstable();
        pages.dedup();
        if let Some(page) = pages.iter().find(|&&page| !self.tree.contains_page(page)) {
            return Err(format!("page {} is in use as shared, but not in the tree", page.0));
        }
        if pages.len() != self.tree.num_locked_pages() {
            return Err(format!(
                "{} pages are in use as shared, {} are locked",
                pages.len(),
                self.tree.num_locked_pages()
            ));
        }
        Ok(())
    }
}
