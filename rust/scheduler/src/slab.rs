//! Storage with small stable indices.

use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

/// An index into a [`Slab`].
pub(crate) trait SlabId: Copy {
    fn new(index: u32) -> Self;
    fn index(self) -> usize;
}

/// Values by id; the id of a removed value is given out again.
#[derive(Debug)]
pub(crate) struct Slab<I, T> {
    entries: Vec<Option<T>>,
    free: Vec<u32>,
    id: PhantomData<I>,
}

impl<I: SlabId, T> Slab<I, T> {
    pub(crate) fn new() -> Self {
        Self { entries: Vec::new(), free: Vec::new(), id: PhantomData }
    }

    pub(crate) fn insert(&mut self, value: T) -> I {
        if let Some(index) = self.free.pop() {
            self.entries[index as usize] = Some(value);
            I::new(index)
        } else {
            self.entries.push(Some(value));
            I::new(self.entries.len() as u32 - 1)
        }
    }

    pub(crate) fn remove(&mut self, id: I) -> T {
        self.free.push(id.index() as u32);
        self.entries[id.index()].take().expect("broken invariant: the id is live")
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (I, &T)> {
        let entries = self.entries.iter().enumerate();
        entries.filter_map(|(index, entry)| Some((I::new(index as u32), entry.as_ref()?)))
    }

    pub(crate) fn get(&self, id: I) -> Option<&T> {
        self.entries.get(id.index())?.as_ref()
    }
}

impl<I: SlabId, T> Index<I> for Slab<I, T> {
    type Output = T;

    fn index(&self, id: I) -> &T {
        self.entries[id.index()].as_ref().expect("broken invariant: the id is live")
    }
}

impl<I: SlabId, T> IndexMut<I> for Slab<I, T> {
    fn index_mut(&mut self, id: I) -> &mut T {
        self.entries[id.index()].as_mut().expect("broken invariant: the id is live")
    }
}
