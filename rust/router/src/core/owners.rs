//! Which workers hold a block: a few slots inline, or one bit per slot.

use super::index::Slot;

const FEW: usize = 7;

/// A set of slots. At most seven are kept inline and sorted, more as a bitset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Owners {
    Few { count: u8, slots: [Slot; FEW] },
    Many { count: u32, words: Box<[u64]> },
}

impl Default for Owners {
    fn default() -> Self {
        Self::Few { count: 0, slots: [0; FEW] }
    }
}

impl Owners {
    pub(super) fn count(&self) -> usize {
        match self {
            Self::Few { count, .. } => usize::from(*count),
            Self::Many { count, .. } => *count as usize,
        }
    }

    pub(super) fn contains(&self, slot: Slot) -> bool {
        match self {
            Self::Few { count, slots } => slots[..usize::from(*count)].contains(&slot),
            Self::Many { words, .. } => {
                words.get(word(slot)).is_some_and(|bits| bits & bit(slot) != 0)
            }
        }
    }

    /// Adds a slot that is not in the set.
    pub(super) fn insert(&mut self, slot: Slot) {
        match self {
            Self::Few { count, slots } if usize::from(*count) < FEW => {
                slots[usize::from(*count)] = slot;
                *count += 1;
            }
            Self::Few { slots, .. } => {
                let highest = slots.iter().fold(slot, |highest, other| highest.max(*other));
                let mut words = vec![0; word(highest) + 1].into_boxed_slice();
                for other in slots.iter().chain([&slot]) {
                    words[word(*other)] |= bit(*other);
                }
                *self = Self::Many { count: FEW as u32 + 1, words };
            }
            Self::Many { count, words } => {
                if word(slot) >= words.len() {
                    let mut longer = vec![0; word(slot) + 1].into_boxed_slice();
                    longer[..words.len()].copy_from_slice(words);
                    *words = longer;
                }
                words[word(slot)] |= bit(slot);
                *count += 1;
            }
        }
    }

    /// Takes out a slot that is in the set.
    pub(super) fn remove(&mut self, slot: Slot) {
        match self {
            Self::Few { count, slots } => {
                let used = usize::from(*count);
                let place = slots[..used].iter().position(|other| *other == slot);
                slots.swap(place.expect("the slot owns the block"), used - 1);
                *count -= 1;
            }
            Self::Many { count, words } => {
                words[word(slot)] &= !bit(slot);
                *count -= 1;
                // Half of what made it a bitset, so that a set at the limit does not flip each time.
                if (*count as usize) <= FEW / 2 {
                    let mut few = Self::default();
                    for_each_bit(words, |slot| few.insert(slot));
                    *self = few;
                }
            }
        }
    }

    /// Calls `visit` for the slots that are not in `seen` (one bit per slot), and adds them to it.
    pub(super) fn visit_new(&self, seen: &mut [u64], mut visit: impl FnMut(Slot)) {
        match self {
            Self::Few { count, slots } => {
                for slot in &slots[..usize::from(*count)] {
                    if seen[word(*slot)] & bit(*slot) == 0 {
                        seen[word(*slot)] |= bit(*slot);
                        visit(*slot);
                    }
                }
            }
            Self::Many { words, .. } => {
                for (index, (bits, seen)) in words.iter().zip(seen).enumerate() {
                    let mut new = bits & !*seen;
                    *seen |= bits;
                    while new != 0 {
                        visit((index * 64) as Slot + new.trailing_zeros() as Slot);
                        new &= new - 1;
                    }
                }
            }
        }
    }

    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Self::Few { .. } => 0,
            Self::Many { words, .. } => words.len() * 8,
        }
    }
}

fn word(slot: Slot) -> usize {
    usize::from(slot) / 64
}

fn bit(slot: Slot) -> u64 {
    1 << (slot % 64)
}

fn for_each_bit(words: &[u64], mut visit: impl FnMut(Slot)) {
    for (index, word) in words.iter().enumerate() {
        let mut bits = *word;
        while bits != 0 {
            visit((index * 64) as Slot + bits.trailing_zeros() as Slot);
            bits &= bits - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    #[test]
    fn behaves_like_a_set() {
        for seed in 0..200 {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let limit = rng.random_range(2..200);
            let (mut owners, mut model) = (Owners::default(), BTreeSet::new());
            for _ in 0..100 {
                let slot = rng.random_range(0..limit);
                if model.remove(&slot) {
                    owners.remove(slot);
                } else {
                    model.insert(slot);
                    owners.insert(slot);
                }
                assert_eq!(owners.count(), model.len());
                assert!((0..limit).all(|slot| owners.contains(slot) == model.contains(&slot)));
                let mut seen = vec![0; 4];
                let half: BTreeSet<_> =
                    model.iter().copied().filter(|slot| slot % 2 == 0).collect();
                for slot in &half {
                    seen[word(*slot)] |= bit(*slot);
                }
                let mut new = BTreeSet::new();
                owners.visit_new(&mut seen, |slot| assert!(new.insert(slot)));
                assert_eq!(new, &model - &half);
                owners.visit_new(&mut seen, |slot| panic!("{slot} was seen"));
            }
        }
    }
}
