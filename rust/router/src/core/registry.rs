//! The workers.

use std::collections::HashMap;

use rustc_hash::FxBuildHasher;
use xxhash_rust::xxh3::xxh3_64;

use super::breaker::Breaker;
use super::error::RouterError;
use super::index::Slot;
use super::load::Load;

const MAX_WORKERS: usize = 1 << 15;

/// Names a worker for as long as the router lives; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub u32);

/// Whether a worker gets requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerState {
    /// New; not yet seen healthy.
    Joining,
    /// It gets requests.
    Ready,
    /// It finishes what it has.
    Draining,
    /// It does not answer.
    Down,
}

/// What is told of a worker when it is added.
#[derive(Clone, Copy, Debug)]
pub struct WorkerOptions<'a> {
    /// Its name, an address for instance. Routers that use the same names place cold prompts alike.
    pub name: &'a str,
    /// Blocks that its cache holds: the most that is remembered of it.
    pub capacity_blocks: usize,
    /// The state in which it begins.
    pub state: WorkerState,
}

impl Default for WorkerOptions<'_> {
    fn default() -> Self {
        Self { name: "", capacity_blocks: 1 << 16, state: WorkerState::Ready }
    }
}

/// One worker.
#[derive(Debug)]
pub struct Worker {
    /// Its id.
    pub id: WorkerId,
    /// Its name.
    pub name: String,
    /// Whether it gets requests.
    pub state: WorkerState,
    /// What it has to do.
    pub load: Load,
    /// Whether it is trusted.
    pub breaker: Breaker,
    /// Requests that it was chosen for.
    pub selected: u64,
    pub(super) key: u64,
}

/// Workers by slot and by id.
#[derive(Default)]
pub(super) struct Registry {
    slots: Vec<Option<Worker>>,
    free: Vec<Slot>,
    by_id: HashMap<WorkerId, Slot, FxBuildHasher>,
    next: u32,
}

impl Registry {
    pub(super) fn add(
        &mut self,
        options: &WorkerOptions<'_>,
    ) -> Result<(WorkerId, Slot), RouterError> {
        if self.iter().any(|(_, worker)| worker.name == options.name) {
            return Err(RouterError::DuplicateWorker(options.name.to_owned()));
        }
        if self.by_id.len() == MAX_WORKERS {
            return Err(RouterError::TooManyWorkers(MAX_WORKERS));
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as Slot
        });
        let id = WorkerId(self.next);
        self.next += 1;
        self.by_id.insert(id, slot);
        self.slots[usize::from(slot)] = Some(Worker {
            id,
            name: options.name.to_owned(),
            state: options.state,
            load: Load::default(),
            breaker: Breaker::default(),
            selected: 0,
            key: xxh3_64(options.name.as_bytes()),
        });
        Ok((id, slot))
    }

    pub(super) fn remove(&mut self, id: WorkerId) -> Option<(Worker, Slot)> {
        let slot = self.by_id.remove(&id)?;
        self.free.push(slot);
        let worker = self.slots[usize::from(slot)].take().expect("a known id has a worker");
        Some((worker, slot))
    }

    pub(super) fn slot(&self, id: WorkerId) -> Result<Slot, RouterError> {
        self.by_id.get(&id).copied().ok_or(RouterError::UnknownWorker(id.0))
    }

    pub(super) fn at(&self, slot: Slot) -> &Worker {
        self.slots[usize::from(slot)].as_ref().expect("the slot is in use")
    }

    pub(super) fn at_mut(&mut self, slot: Slot) -> &mut Worker {
        self.slots[usize::from(slot)].as_mut().expect("the slot is in use")
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Slot, &Worker)> {
        let slots = self.slots.iter().enumerate();
        slots.filter_map(|(slot, worker)| Some((slot as Slot, worker.as_ref()?)))
    }

    /// One more than the highest slot.
    pub(super) fn num_slots(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }
}
