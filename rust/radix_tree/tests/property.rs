//! Random operations on the tree and on a naive model side by side, with every invariant checked
//! after each of them.

mod naive;

use std::collections::BTreeSet;

use naive::{Entry, Naive};
use radix_tree::{NamespaceId, NodeId, PageId, PageOutcome, Peek, RadixError, RadixTree};
use rand::{RngExt, SeedableRng, seq::IndexedRandom};
use rand_chacha::ChaCha8Rng;

const OPERATIONS_PER_SEED: usize = 7_500;
const SEEDS: u64 = 4;
const LONG_SEEDS: u64 = 100;
const POOL_PAGES: u32 = 40;
const MAX_KEY_PAGES: usize = 5;
const NAMESPACES: u32 = 2;
/// How many keys, node ids and measured matches the driver remembers.
const MEMORY: usize = 12;

/// A node id that the tree gave out, and the pages that it stands for.
#[derive(Debug, Clone)]
struct KnownNode {
    id: NodeId,
    namespace: NamespaceId,
    tokens: Vec<u32>,
    serials: Vec<u64>,
}

struct Driver {
    rng: ChaCha8Rng,
    vocabulary: u32,
    tree: RadixTree,
    model: Naive,
    /// Pages that are not in the tree.
    free: Vec<PageId>,
    keys: Vec<Vec<u32>>,
    nodes: Vec<KnownNode>,
    locked: Vec<KnownNode>,
    peeks: Vec<(NamespaceId, Vec<u32>, Peek)>,
    num_stale: usize,
}

impl Driver {
    fn new(page_size: usize, vocabulary: u32, seed: u64) -> Self {
        Self {
            rng: ChaCha8Rng::seed_from_u64(seed),
            vocabulary,
            tree: RadixTree::new(page_size),
            model: Naive::new(page_size),
            free: (1..=POOL_PAGES).map(PageId).collect(),
            keys: Vec::new(),
            nodes: Vec::new(),
            locked: Vec::new(),
            peeks: Vec::new(),
            num_stale: 0,
        }
    }

    fn step(&mut self) {
        match self.rng.random_range(0..100) {
            0..35 => self.insert(),
            35..58 => self.find(),
            58..66 => self.peek(),
            66..76 => self.lock(),
            76..88 => self.unlock(),
            88..98 => {
                let num_pages = self.rng.random_range(0..6);
                self.evict(num_pages);
            }
            98 => self.insert_wrong_number(),
            _ => self.clear(),
        }
        self.check();
    }

    fn namespace(&mut self) -> NamespaceId {
        NamespaceId(self.rng.random_range(0..NAMESPACES))
    }

    /// A key that shares a random part with an earlier one.
    fn key(&mut self) -> Vec<u32> {
        let page_size = self.tree.page_size();
        let mut key = self.keys.choose(&mut self.rng).cloned().unwrap_or_default();
        let mut cut = self.rng.random_range(0..=key.len());
        if self.rng.random_bool(0.3) {
            cut -= cut % page_size;
        }
        key.truncate(cut);
        for _ in 0..self.rng.random_range(0..=2 * page_size + 1) {
            key.push(self.rng.random_range(0..self.vocabulary));
        }
        key.truncate(MAX_KEY_PAGES * page_size);
        remember(&mut self.keys, key.clone());
        key
    }

    fn find(&mut self) {
        let (namespace, key) = (self.namespace(), self.key());
        let expected = self.model.longest(namespace, &key);
        assert_eq!(
            self.tree.peek(namespace, &key).num_tokens,
            expected.path.len() * self.tree.page_size() + expected.donated
        );
        let found = self.tree.match_prefix(namespace, &key);
        let pages: Vec<PageId> = expected.path.iter().map(|entry| entry.page).collect();
        assert_eq!(found.pages, pages);
        assert_eq!(found.num_tokens, pages.len() * self.tree.page_size() + expected.donated);
        let mut serials: Vec<u64> = expected.path.iter().map(|entry| entry.serial).collect();
        let tokens = key[..pages.len() * self.tree.page_size()].to_vec();
        let node = KnownNode { id: found.node, namespace, tokens, serials: serials.clone() };
        remember(&mut self.nodes, node);
        assert_eq!(found.donor.is_some(), expected.donated > 0);
        if let Some(donor) = found.donor {
            assert_eq!(donor.num_tokens as usize, expected.donated);
            let entry = expected.donors.iter().find(|entry| entry.page == donor.page);
            let Entry { serial, prefix, .. } = entry.expect("one of the best donors").clone();
            serials.push(serial);
            let node =
                KnownNode { id: donor.node, namespace, tokens: prefix, serials: serials.clone() };
            remember(&mut self.nodes, node);
        }
        self.model.touch(&serials);
    }

    fn insert(&mut self) {
        let (mut namespace, mut key) = (self.namespace(), self.key());
        // Sometimes only what comes after a known node is given.
        let base = self.nodes.choose(&mut self.rng).cloned().filter(|node| {
            self.is_valid(node) && node.tokens.len().is_multiple_of(self.tree.page_size())
        });
        if let Some(base) = &base {
            namespace = base.namespace;
            key = [&base.tokens[..], &key[..]].concat();
        }
        let Some(pages) = self.pages_for(namespace, &key) else { return };
        let is_stale = base.as_ref().is_some_and(|base| !self.is_valid(base));
        let (start, skipped) = base.map_or((NodeId::ROOT, 0), |base| (base.id, base.serials.len()));
        let tail = &key[skipped * self.tree.page_size()..];
        let inserted = self.tree.insert_below(namespace, start, tail, &pages[skipped..]);
        if is_stale {
            // Room for the new pages was made by evicting the node.
            assert_eq!(inserted, Err(RadixError::StaleNode { node: start }));
            self.take_back(pages);
            return;
        }
        let expected = match self.model.insert(namespace, &key, &pages) {
            Ok(expected) => expected,
            Err(page) => {
                assert_eq!(inserted, Err(RadixError::PageInUse(page)));
                self.take_back(pages);
                return;
            }
        };
        let inserted = inserted.expect("the model accepts it");
        assert_eq!(inserted.outcomes.len(), pages.len() - skipped);
        for (index, outcome) in inserted.outcomes.iter().enumerate() {
            self.check_outcome(*outcome, expected.outcomes[skipped + index], namespace, &key);
        }
        let freed: BTreeSet<PageId> = inserted.freed.iter().copied().collect();
        assert_eq!(freed.len(), inserted.freed.len());
        assert_eq!(freed, expected.freed.iter().copied().collect());
        self.take_back(pages);
        self.take_back(inserted.freed);
        let covered = match expected.path.last() {
            None => 0,
            Some(last) => {
                let entry = self.model.entries.iter().find(|entry| entry.serial == *last);
                entry.expect("the path is in the model").prefix.len()
            }
        };
        let tokens = key[..covered].to_vec();
        let node = KnownNode { id: inserted.node, namespace, tokens, serials: expected.path };
        remember(&mut self.nodes, node);
    }

    fn check_outcome(
        &self,
        outcome: PageOutcome,
        expected: PageOutcome,
        namespace: NamespaceId,
        key: &[u32],
    ) {
        if let (PageOutcome::Duplicate { tree_page }, PageOutcome::Duplicate { .. }) =
            (outcome, expected)
        {
            let holder = self.model.entries.iter().find(|entry| entry.page == tree_page);
            let holder = holder.expect("the tree's page is in the model");
            assert_eq!(holder.namespace, namespace);
            let common = key.len().min(holder.prefix.len());
            assert_eq!(key[..common], holder.prefix[..common]);
        } else {
            assert_eq!(outcome, expected);
        }
    }

    /// Pages to insert a key with: fresh ones, the tree's own, or (rarely) wrong ones. None if the
    /// pool is too small.
    fn pages_for(&mut self, namespace: NamespaceId, key: &[u32]) -> Option<Vec<PageId>> {
        let page_size = self.tree.page_size();
        let num_pages = key.len().div_ceil(page_size);
        if self.free.len() < num_pages {
            self.evict(num_pages - self.free.len());
        }
        if self.free.len() < num_pages {
            return None;
        }
        let mut pages = Vec::new();
        for index in 0..num_pages {
            let prefix = &key[..key.len().min((index + 1) * page_size)];
            let mut candidates = self.model.holders(namespace, prefix);
            candidates.extend(self.model.partial_prefixes(namespace, prefix));
            if self.rng.random_bool(0.02) {
                candidates = self.model.entries.iter().collect();
            }
            let owned = candidates.choose(&mut self.rng).map(|entry| entry.page);
            let owned = owned.filter(|_| self.rng.random_bool(0.5));
            pages.push(owned.unwrap_or_else(|| self.free.pop().expect("enough free pages")));
        }
        Some(pages)
    }

    /// Returns those pages to the pool that the tree does not own. Wrong calls name pages twice.
    fn take_back(&mut self, pages: Vec<PageId>) {
        for page in pages {
            if !self.model.owns(page) && !self.free.contains(&page) {
                self.free.push(page);
            }
        }
    }

    fn insert_wrong_number(&mut self) {
        let key = self.key();
        let needed = key.len().div_ceil(self.tree.page_size());
        let pages = vec![PageId(0); needed + 1];
        let refused = self.tree.insert(NamespaceId(0), &key, &pages);
        assert!(matches!(refused, Err(RadixError::PageCount { .. })));
    }

    fn is_valid(&self, node: &KnownNode) -> bool {
        node.serials.iter().all(|&serial| self.model.is_alive(serial))
    }

    fn lock(&mut self) {
        let Some(node) = self.nodes.choose(&mut self.rng).cloned() else { return };
        let result = self.tree.lock(node.id);
        if self.is_valid(&node) {
            assert_eq!(result, Ok(()));
            self.model.lock(&node.serials);
            self.locked.push(node);
        } else {
            assert_eq!(result, Err(RadixError::StaleNode { node: node.id }));
            assert_eq!(self.tree.unlock(node.id), Err(RadixError::StaleNode { node: node.id }));
        }
    }

    fn unlock(&mut self) {
        if self.locked.is_empty() {
            return;
        }
        let node = self.locked.swap_remove(self.rng.random_range(0..self.locked.len()));
        assert_eq!(self.tree.unlock(node.id), Ok(()));
        self.model.unlock(&node.serials);
        let still_locked = self.locked.iter().any(|other| other.id == node.id);
        if !still_locked && node.id != NodeId::ROOT {
            assert_eq!(self.tree.unlock(node.id), Err(RadixError::NotLocked { node: node.id }));
        }
    }

    fn evict(&mut self, num_pages: usize) {
        let expected = self.model.evict(num_pages);
        let mut freed = vec![PageId(0)];
        assert_eq!(self.tree.evict(num_pages, &mut freed), expected.len());
        assert_eq!(freed[0], PageId(0), "evict appends");
        assert_eq!(freed[1..], expected);
        self.free.extend(expected);
    }

    fn clear(&mut self) {
        let num_locked_pages = self.model.num_locked();
        if num_locked_pages > 0 {
            assert_eq!(self.tree.clear(), Err(RadixError::Locked { num_locked_pages }));
            return;
        }
        let pages = self.tree.clear().expect("nothing is locked");
        assert_eq!(
            pages.iter().copied().collect::<BTreeSet<_>>(),
            self.model.entries.iter().map(|entry| entry.page).collect()
        );
        self.model.entries.clear();
        self.free.extend(pages);
        assert_eq!(self.tree.num_nodes(), 0);
    }

    fn peek(&mut self) {
        let (namespace, key) = (self.namespace(), self.key());
        let peek = self.tree.peek(namespace, &key);
        assert!(self.tree.is_current(peek.watch));
        remember(&mut self.peeks, (namespace, key, peek));
    }

    fn check(&mut self) {
        self.tree.check_integrity().expect("integrity");
        let owned: BTreeSet<PageId> = self.tree.pages().collect();
        assert_eq!(owned, self.model.entries.iter().map(|entry| entry.page).collect());
        assert_eq!(owned.len() + self.free.len(), POOL_PAGES as usize);
        assert!(self.free.iter().all(|&page| !self.tree.contains_page(page)));
        assert_eq!(self.tree.num_pages(), owned.len());
        assert_eq!(self.tree.num_locked_pages(), self.model.num_locked());
        assert_eq!(self.tree.num_evictable_pages(), owned.len() - self.model.num_locked());
        let namespaces: BTreeSet<NamespaceId> =
            self.model.entries.iter().map(|entry| entry.namespace).collect();
        assert_eq!(self.tree.num_namespaces(), namespaces.len());
        for (namespace, key, peek) in &mut self.peeks {
            let expected = self.model.longest(*namespace, key);
            let num_tokens = expected.path.len() * self.tree.page_size() + expected.donated;
            let is_current = self.tree.is_current(peek.watch);
            self.num_stale += usize::from(!is_current);
            assert!(!is_current || peek.num_tokens == num_tokens, "a watch missed a change");
            if self.rng.random_bool(0.2) {
                assert_eq!(self.tree.refresh(*namespace, key, peek), !is_current);
                assert_eq!(peek.num_tokens, num_tokens);
                assert!(self.tree.is_current(peek.watch));
            }
        }
    }
}

/// Keeps a value, dropping an old one if there are many.
fn remember<T>(memory: &mut Vec<T>, value: T) {
    if memory.len() >= MEMORY {
        memory.remove(0);
    }
    memory.push(value);
}

fn run(page_size: usize, vocabulary: u32, seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let mut driver = Driver::new(page_size, vocabulary, seed);
        for _ in 0..OPERATIONS_PER_SEED {
            driver.step();
        }
        while let Some(node) = driver.locked.pop() {
            driver.tree.unlock(node.id).expect("it was locked");
        }
        driver.tree.clear().expect("nothing is locked");
        assert!(driver.num_stale > 0, "no watch ever went stale");
    }
}

#[test]
fn agrees_with_the_model_at_page_size_1() {
    run(1, 3, 0..SEEDS);
}

#[test]
fn agrees_with_the_model_at_page_size_2() {
    run(2, 2, 0..SEEDS);
}

#[test]
fn agrees_with_the_model_at_page_size_3() {
    run(3, 2, 0..SEEDS);
}

#[test]
fn agrees_with_the_model_at_page_size_4() {
    run(4, 3, 0..SEEDS);
}

#[test]
fn agrees_with_the_model_at_page_size_16() {
    run(16, 2, 0..SEEDS);
}

#[test]
#[ignore = "millions of operations"]
fn agrees_with_the_model_for_long() {
    for (page_size, vocabulary) in [(1, 2), (2, 3), (3, 3), (4, 2), (16, 3)] {
        run(page_size, vocabulary, SEEDS..SEEDS + LONG_SEEDS);
    }
}
