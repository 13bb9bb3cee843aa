//! Every invariant of the scheduler, checked from scratch.

use rustc_hash::FxHashMap;

use crate::memory::Kv;
use crate::request::SampleState;
use crate::sequence::{Phase, Sequence, SequenceId};
use crate::slab::SlabId;
use crate::state::State;

/// Returns what does not hold, if anything.
pub(crate) fn check(state: &State) -> Result<(), String> {
    check_memory(state)?;
    check_places(state)?;
    check_requests(state)?;
    for (id, sequence) in state.sequences.iter() {
        check_sequence(state, sequence).map_err(|error| format!("sequence {id:?}: {error}"))?;
    }
    check_in_flight(state)
}

fn ensure(holds: bool, error: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(error()) }
}

/// Every page has one owner; what sequences and donors use of the cache is locked, and nothing else.
fn check_memory(state: &State) -> Result<(), String> {
    let all = || state.sequences.iter().map(|(_, sequence)| &sequence.kv);
    let private = all().flat_map(Kv::private_pages);
    let donors = state.in_flight.iter().flat_map(|step| step.donors.iter().map(|(_, page)| page));
    let locked = all().flat_map(Kv::shared_pages).chain(donors);
    state.memory.check(private, locked)
}

/// Each sequence is where its phase says, once.
fn check_places(state: &State) -> Result<(), String> {
    let mut slots = FxHashMap::default();
    let mut count = [0_usize; 4];
    for (id, sequence) in state.sequences.iter() {
        let place = match sequence.phase {
            Phase::Preparing => 0,
            Phase::Waiting => 1,
            Phase::Following(leader) => {
                let leads = state.sequences.get(leader).is_some_and(|leader| leader.leads);
                ensure(leads, || format!("{id:?} follows {leader:?}, which does not lead"))?;
                2
            }
            Phase::Running | Phase::Draining => {
                let other = slots.insert(sequence.slot, id);
                ensure(other.is_none(), || {
                    format!("slot {} has both {id:?} and {other:?}", sequence.slot)
                })?;
                3
            }
        };
        count[place] += 1;
    }
    let free = state.slots.num_free();
    let total = state.config.max_running_requests as usize;
    ensure(slots.len() + free == total, || {
        format!("{} slots in use and {free} free are not {total}", slots.len())
    })?;
    ensure(count[0] == state.num_preparing, || format!("{} sequences are prepared", count[0]))?;
    ensure(count[1] == state.queue.len(), || format!("{} sequences wait", count[1]))?;
    ensure(count[2] == state.sharing.num_followers(), || format!("{} follow", count[2]))?;
    for id in state.queue.iter() {
        let waits = state.sequences.get(id).is_some_and(|found| found.phase == Phase::Waiting);
        ensure(waits, || format!("{id:?} is in the queue and does not wait"))?;
    }
    let running =
        |id: SequenceId| state.sequences.get(id).is_some_and(|found| found.phase == Phase::Running);
    ensure(state.running.iter().all(|&id| running(id)), || "a stopped sequence runs".into())?;
    let distinct: std::collections::BTreeSet<_> = state.running.iter().collect();
    let expected =
        state.sequences.iter().filter(|(_, found)| found.phase == Phase::Running).count();
    ensure(distinct.len() == state.running.len() && expected == distinct.len(), || {
        format!("{} of {expected} running sequences are listed", state.running.len())
    })
}

/// Requests and sequences agree on each other.
fn check_requests(state: &State) -> Result<(), String> {
    let mut live = 0;
    for index in state.requests.all() {
        let request = state.requests.get(index);
        let unfinished =
            request.samples.iter().filter(|&&sample| sample != SampleState::Finished).count();
        ensure(unfinished == request.unfinished as usize && unfinished > 0, || {
            format!("request {}: {unfinished} samples are unfinished", request.id)
        })?;
        let mut has_next = false;
        for sample in &request.samples {
            if let SampleState::Live(id) = *sample {
                live += 1;
                let sequence = state.sequences.get(id);
                let own = sequence.is_some_and(|sequence| sequence.request == index);
                ensure(own, || format!("request {} has lost a sample", request.id))?;
                has_next |= sequence.is_some_and(|sequence| !sequence.timing.admitted);
            }
        }
        let pending = request.samples.contains(&SampleState::Pending);
        ensure(has_next || !pending, || format!("request {} is stuck", request.id))?;
    }
    let draining =
        state.sequences.iter().filter(|(_, found)| found.phase == Phase::Draining).count();
    ensure(live + draining == state.sequences.len(), || {
        format!("{live} live and {draining} draining sequences of {}", state.sequences.len())
    })
}

fn check_sequence(state: &State, sequence: &Sequence) -> Result<(), String> {
    let known = sequence.known().len() as u32;
    ensure(known <= sequence.bounds.limit, || format!("{known} tokens exceed the limit"))?;
    ensure(sequence.computed <= known, || format!("{} computed of {known}", sequence.computed))?;
    ensure(sequence.planned <= sequence.known_len(), || "planned beyond the known".into())?;
    match sequence.phase {
        Phase::Preparing | Phase::Waiting | Phase::Following(_) => {
            ensure(sequence.kv.pages.is_empty(), || "waits, and has pages".into())?;
            ensure(sequence.in_flight == 0, || "waits, and is in flight".into())?;
            ensure(!sequence.leads, || "waits, and leads".into())
        }
        Phase::Draining => ensure(sequence.in_flight > 0, || "drains for no step".into()),
        Phase::Running => {
            let pages = state.config.pages_for(sequence.planned) as usize;
            ensure(sequence.kv.pages.len() >= pages, || {
                format!("{} pages for {} tokens", sequence.kv.pages.len(), sequence.planned)
            })?;
            let computing = sequence.computed < sequence.fill_target;
            ensure(computing || !sequence.leads, || "leads, and has nothing to compute".into())
        }
    }
}

/// Steps name live sequences, as often as these think.
fn check_in_flight(state: &State) -> Result<(), String> {
    let mut rows: FxHashMap<SequenceId, u32> = FxHashMap::default();
    for step in &state.in_flight {
        for row in &step.rows {
            *rows.entry(row.sequence).or_default() += 1;
        }
    }
    for (id, sequence) in state.sequences.iter() {
        let named = rows.remove(&id).unwrap_or(0);
        ensure(named == sequence.in_flight, || {
            format!("{id:?} has {} steps in flight, {named} name it", sequence.in_flight)
        })?;
    }
    ensure(rows.is_empty(), || {
        let ids: Vec<_> = rows.keys().map(|id| id.index()).collect();
        format!("steps in flight name the dead sequences {ids:?}")
    })
}
