//! Which worker probably has which prefix in its cache.
//!
//! Every worker has a bounded LRU of block hashes, and every block the set of its owners. A chain is
//! touched from its end to its beginning, so a block is always more recent than those that follow it:
//! evicting the least recent block never leaves a hole before a kept suffix. Owners of a chain's
//! blocks are therefore nested sets, and the longest match of *all* workers takes a binary search
//! for each depth at which a worker drops out, not a walk per worker.

use std::collections::HashMap;
use std::mem::size_of;

use rustc_hash::FxBuildHasher;

use super::owners::Owners;

/// Place of a worker in the registry; reused after it has left.
pub type Slot = u16;

const NONE: u32 = u32::MAX;

/// The index over all workers. Deterministic; knows neither tokens nor load.
#[derive(Default)]
pub struct PrefixIndex {
    owners: HashMap<u64, Owners, FxBuildHasher>,
    caches: Vec<Option<Cache>>,
}

/// One worker's blocks, a doubly linked list from the most recent to the least.
struct Cache {
    capacity: usize,
    places: HashMap<u64, u32, FxBuildHasher>,
    nodes: Vec<Node>,
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
}

#[derive(Clone, Copy)]
struct Node {
    hash: u64,
    /// Which touch was the last one.
    stamp: u64,
    newer: u32,
    older: u32,
}

/// For one prompt: each set of owners and how many leading blocks it has.
pub(super) struct Step<'a> {
    pub(super) depth: u32,
    pub(super) owners: &'a Owners,
}

impl PrefixIndex {
    /// An empty index.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes room for a worker with a cache of `capacity` blocks (at least 1).
    ///
    /// # Panics
    /// If the slot is taken.
    pub fn add(&mut self, slot: Slot, capacity: usize) {
        let place = usize::from(slot);
        if self.caches.len() <= place {
            self.caches.resize_with(place + 1, || None);
        }
        assert!(self.caches[place].is_none(), "slot {slot} is taken");
        self.caches[place] = Some(Cache::new(capacity.max(1)));
    }

    /// Forgets a worker and every block of it.
    pub fn remove(&mut self, slot: Slot) {
        self.clear(slot);
        if let Some(cache) = self.caches.get_mut(usize::from(slot)) {
            *cache = None;
        }
    }

    /// Forgets every block of a worker, whose cache was lost.
    pub fn clear(&mut self, slot: Slot) {
        let Some(Some(cache)) = self.caches.get_mut(usize::from(slot)) else { return };
        for hash in cache.places.keys() {
            disown(&mut self.owners, *hash, slot);
        }
        *cache = Cache::new(cache.capacity);
    }

    /// Changes how many blocks a worker's cache holds, dropping the least recent ones.
    pub fn resize(&mut self, slot: Slot, capacity: usize) {
        let Some(Some(cache)) = self.caches.get_mut(usize::from(slot)) else { return };
        cache.capacity = capacity.max(1);
        while cache.places.len() > cache.capacity {
            let hash = cache.pop_oldest();
            disown(&mut self.owners, hash, slot);
        }
    }

    /// Notes that a worker now has this chain, or as much of its beginning as its cache holds.
    ///
    /// `stamp` names the touch for [`PrefixIndex::undo`].
    pub fn touch(&mut self, slot: Slot, hashes: &[u64], stamp: u64) {
        let Some(Some(cache)) = self.caches.get_mut(usize::from(slot)) else { return };
        let kept = &hashes[..hashes.len().min(cache.capacity)];
        for hash in kept.iter().rev() {
            if let Some(place) = cache.places.get(hash).copied() {
                cache.refresh(place, stamp);
                continue;
            }
            if cache.places.len() == cache.capacity {
                let evicted = cache.pop_oldest();
                disown(&mut self.owners, evicted, slot);
            }
            cache.push(*hash, stamp);
            self.owners.entry(*hash).or_default().insert(slot);
        }
    }

    /// Forgets the blocks from `first` on that this touch was the last to meet: it came to nothing.
    pub fn undo(&mut self, slot: Slot, hashes: &[u64], first: usize, stamp: u64) {
        let Some(Some(cache)) = self.caches.get_mut(usize::from(slot)) else { return };
        for hash in hashes.iter().skip(first).rev() {
            // A block that a later touch extended was met by that touch too, and stays.
            let place = cache.places.get(hash).copied();
            if let Some(place) = place.filter(|place| cache.nodes[*place as usize].stamp == stamp) {
                cache.take(place);
                disown(&mut self.owners, *hash, slot);
            }
        }
    }

    /// How many leading blocks of the chain a worker has.
    pub fn depth(&self, slot: Slot, hashes: &[u64]) -> usize {
        let owns = |hash: &u64| self.owners.get(hash).is_some_and(|owners| owners.contains(slot));
        hashes.partition_point(owns)
    }

    /// The distinct owner sets along the chain, shallowest first.
    pub(super) fn steps<'a>(&'a self, hashes: &[u64], steps: &mut Vec<Step<'a>>) {
        if let Some(first) = hashes.first().and_then(|hash| self.owners.get(hash)) {
            self.search(hashes, (0, first), (hashes.len(), None), steps);
        }
    }

    /// Finds the changes between two places whose owners are known; beyond the chain's end nobody.
    fn search<'a>(
        &'a self,
        hashes: &[u64],
        low: (usize, &'a Owners),
        high: (usize, Option<&'a Owners>),
        steps: &mut Vec<Step<'a>>,
    ) {
        if high.1.is_some_and(|owners| owners.count() == low.1.count()) {
            return;
        }
        if high.0 == low.0 + 1 {
            steps.push(Step { depth: high.0 as u32, owners: low.1 });
            return;
        }
        let middle = usize::midpoint(low.0, high.0);
        let owners = self.owners.get(&hashes[middle]);
        match owners {
            Some(owners) => {
                self.search(hashes, low, (middle, Some(owners)), steps);
                self.search(hashes, (middle, owners), high, steps);
            }
            None => self.search(hashes, low, (middle, None), steps),
        }
    }

    /// Blocks of all workers; one that two workers have counts twice.
    pub fn num_owned_blocks(&self) -> usize {
        self.caches.iter().flatten().map(|cache| cache.places.len()).sum()
    }

    /// Blocks of one worker.
    pub fn num_blocks(&self, slot: Slot) -> usize {
        let cache = self.caches.get(usize::from(slot)).and_then(Option::as_ref);
        cache.map_or(0, |cache| cache.places.len())
    }

    /// Memory in use, estimated from the tables' sizes. Takes time in proportion to the blocks only
    /// where more than seven workers share them.
    pub fn num_bytes(&self) -> usize {
        let entry = |value: usize| size_of::<u64>() + value + 1;
        let shared: usize = self.owners.values().map(Owners::heap_bytes).sum();
        let caches = self.caches.iter().flatten().map(|cache| {
            cache.places.capacity() * entry(size_of::<u32>())
                + cache.nodes.capacity() * size_of::<Node>()
                + cache.free.capacity() * size_of::<u32>()
        });
        self.owners.capacity() * entry(size_of::<Owners>()) + shared + caches.sum::<usize>()
    }

    /// Checks that owners and caches agree; the message says where they do not.
    ///
    /// # Errors
    /// An invariant does not hold.
    pub fn check_integrity(&self) -> Result<(), String> {
        let mut owned = 0;
        for (slot, cache) in self.caches.iter().enumerate() {
            let Some(cache) = cache else { continue };
            let chain = cache.newest_first();
            if chain.len() != cache.places.len() || chain.len() > cache.capacity {
                return Err(format!("slot {slot}: {} blocks in the list", chain.len()));
            }
            for hash in chain {
                if !self.owners.get(&hash).is_some_and(|owners| owners.contains(slot as Slot)) {
                    return Err(format!("slot {slot}: not among the owners of {hash:x}"));
                }
            }
            owned += cache.places.len();
        }
        let counted: usize = self.owners.values().map(Owners::count).sum();
        if counted != owned || self.owners.values().any(|owners| owners.count() == 0) {
            return Err(format!("{counted} owners of blocks, {owned} owned blocks"));
        }
        Ok(())
    }
}

fn disown(owners: &mut HashMap<u64, Owners, FxBuildHasher>, hash: u64, slot: Slot) {
    let set = owners.get_mut(&hash).expect("a cached block has an owner");
    set.remove(slot);
    if set.count() == 0 {
        owners.remove(&hash);
    }
}

impl Cache {
    fn new(capacity: usize) -> Self {
        Self {
            capacity,
            places: HashMap::default(),
            nodes: Vec::new(),
            free: Vec::new(),
            newest: NONE,
            oldest: NONE,
        }
    }

    fn push(&mut self, hash: u64, stamp: u64) {
        let node = Node { hash, stamp, newer: NONE, older: NONE };
        let place = if let Some(place) = self.free.pop() {
            self.nodes[place as usize] = node;
            place
        } else {
            self.nodes.push(node);
            (self.nodes.len() - 1) as u32
        };
        self.places.insert(hash, place);
        self.link(place);
    }

    fn refresh(&mut self, place: u32, stamp: u64) {
        self.nodes[place as usize].stamp = stamp;
        if self.newest != place {
            self.unlink(place);
            self.link(place);
        }
    }

    fn pop_oldest(&mut self) -> u64 {
        let place = self.oldest;
        let hash = self.nodes[place as usize].hash;
        self.take(place);
        hash
    }

    fn take(&mut self, place: u32) {
        self.unlink(place);
        self.places.remove(&self.nodes[place as usize].hash);
        self.free.push(place);
    }

    fn link(&mut self, place: u32) {
        self.nodes[place as usize].older = self.newest;
        self.nodes[place as usize].newer = NONE;
        match self.newest {
            NONE => self.oldest = place,
            newest => self.nodes[newest as usize].newer = place,
        }
        self.newest = place;
    }

    fn unlink(&mut self, place: u32) {
        let Node { newer, older, .. } = self.nodes[place as usize];
        match newer {
            NONE => self.newest = older,
            newer => self.nodes[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.nodes[older as usize].newer = newer,
        }
    }

    fn newest_first(&self) -> Vec<u64> {
        let mut hashes = Vec::new();
        let mut place = self.newest;
        while place != NONE && hashes.len() <= self.nodes.len() {
            hashes.push(self.nodes[place as usize].hash);
            place = self.nodes[place as usize].older;
        }
        hashes
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::super::blocks::{BlockShape, Prompt};
    use super::*;

    const SLOTS: Slot = 12;

    /// Prefixes as byte strings, in a list from the least recent to the most.
    #[derive(Default)]
    struct Model {
        prefixes: Vec<(Vec<u8>, u64)>,
        capacity: usize,
    }

    impl Model {
        fn touch(&mut self, text: &[u8], stamp: u64) {
            for end in (1..=text.len().min(self.capacity)).rev() {
                self.prefixes.retain(|(prefix, _)| prefix != &text[..end]);
                self.prefixes.push((text[..end].to_vec(), stamp));
            }
            self.shrink();
        }

        fn shrink(&mut self) {
            let excess = self.prefixes.len().saturating_sub(self.capacity);
            self.prefixes.drain(..excess);
        }

        fn undo(&mut self, text: &[u8], first: usize, stamp: u64) {
            self.prefixes.retain(|(prefix, last)| {
                !(text.starts_with(prefix) && prefix.len() > first && *last == stamp)
            });
        }

        fn depth(&self, text: &[u8]) -> usize {
            let known: HashSet<_> = self.prefixes.iter().map(|(prefix, _)| &prefix[..]).collect();
            (1..=text.len()).take_while(|end| known.contains(&text[..*end])).count()
        }
    }

    fn prompt(text: &[u8]) -> Prompt {
        Prompt::new(text, text.len() as u64, BlockShape { bytes: 1, tokens: 1 }, b"")
    }

    fn check(index: &PrefixIndex, models: &[Model], text: &[u8]) {
        let prompt = prompt(text);
        let mut steps = Vec::new();
        index.steps(prompt.hashes(), &mut steps);
        let mut found = vec![0; models.len()];
        let mut seen = [0; 1];
        for step in steps.iter().rev() {
            step.owners.visit_new(&mut seen, |slot| found[usize::from(slot)] = step.depth as usize);
        }
        for (slot, model) in models.iter().enumerate() {
            let expected = model.depth(text);
            assert_eq!(found[slot], expected, "slot {slot}");
            assert_eq!(index.depth(slot as Slot, prompt.hashes()), expected);
            assert_eq!(index.num_blocks(slot as Slot), model.prefixes.len());
        }
    }

    #[test]
    fn finds_what_a_list_of_prefixes_finds() {
        for seed in 0..300 {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let mut index = PrefixIndex::new();
            let mut models: Vec<Model> = Vec::new();
            for slot in 0..SLOTS {
                let capacity = rng.random_range(1..30);
                index.add(slot, capacity);
                models.push(Model { capacity, ..Model::default() });
            }
            for stamp in 0..150 {
                let length = rng.random_range(0..14);
                let text: Vec<u8> = (0..length).map(|_| rng.random_range(0..2)).collect();
                let slot = rng.random_range(0..SLOTS);
                let (place, hashes) = (usize::from(slot), prompt(&text));
                match rng.random_range(0..20) {
                    0 => {
                        index.clear(slot);
                        models[place].prefixes.clear();
                    }
                    1 => {
                        let capacity = rng.random_range(1..30);
                        index.resize(slot, capacity);
                        models[place].capacity = capacity;
                        models[place].shrink();
                    }
                    2 => {
                        index.remove(slot);
                        index.add(slot, models[place].capacity);
                        models[place].prefixes.clear();
                    }
                    3..6 => {
                        let first = index.depth(slot, hashes.hashes());
                        index.touch(slot, hashes.hashes(), stamp);
                        models[place].touch(&text, stamp);
                        index.undo(slot, hashes.hashes(), first, stamp);
                        models[place].undo(&text, first, stamp);
                    }
                    _ => {
                        index.touch(slot, hashes.hashes(), stamp);
                        models[place].touch(&text, stamp);
                    }
                }
                index.check_integrity().expect("sound");
                check(&index, &models, &text);
            }
        }
    }

    #[test]
    fn a_late_undo_keeps_what_others_built_on() {
        let mut index = PrefixIndex::new();
        index.add(0, 100);
        index.touch(0, prompt(b"abcd").hashes(), 1);
        index.touch(0, prompt(b"abxy").hashes(), 2);
        index.undo(0, prompt(b"abcd").hashes(), 0, 1);
        assert_eq!(index.depth(0, prompt(b"abcd").hashes()), 2);
        assert_eq!(index.depth(0, prompt(b"abxy").hashes()), 4);
        index.check_integrity().expect("sound");
    }

    #[test]
    fn memory_is_bounded_under_distinct_prefixes() {
        let mut index = PrefixIndex::new();
        for slot in 0..4 {
            index.add(slot, 1_000);
        }
        for number in 0..200_000_u64 {
            let names = [number, number + 1, number + 2];
            let prompt = Prompt::from_block_names(&names, 3, 1);
            index.touch((number % 4) as Slot, prompt.hashes(), number);
        }
        assert_eq!(index.num_owned_blocks(), 4_000);
        assert!(index.num_bytes() < 1 << 20, "{} bytes", index.num_bytes());
        for slot in 0..4 {
            index.remove(slot);
        }
        assert_eq!(index.owners.len(), 0);
    }
}
