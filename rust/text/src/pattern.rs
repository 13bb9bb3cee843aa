//! Stop patterns: regular expressions matched while the text grows.
//!
//! The NFA is that of the `regex-automata` crate; it is simulated here because the crate's searches
//! start over for every text, and none tells how much of a text's end may still become a match. Each
//! thread of the simulation is a state and the place where its match would begin.

use regex_automata::nfa::thompson::{Compiler, Config, NFA, State, WhichCaptures};
use regex_automata::util::look::Look;
use regex_automata::util::primitives::StateID;
use regex_syntax::hir;

use crate::Error;

/// Bytes that the automaton of one request's patterns may take: they bound the time per character.
const MAX_NFA_BYTES: usize = 256 << 10;
const ASSERTIONS: &str =
    "of the assertions only ^ and \\A are supported: what others say depends on text to come";

/// The stop patterns of a request, compiled together. Immutable.
pub(crate) struct StopPatterns {
    patterns: Vec<String>,
    nfa: NFA,
    /// Whether a match can begin with the byte.
    begins: Box<[bool; 256]>,
}

/// The matches that are under way at the end of a text.
#[derive(Clone, Debug, Default)]
pub(crate) struct PatternState {
    /// Earliest beginning first, each state once.
    threads: Vec<Thread>,
    next: Vec<Thread>,
    /// States in `next`, marked with `round`.
    seen: Vec<u32>,
    round: u32,
    pending: Vec<StateID>,
    /// Bytes scanned so far.
    position: u64,
    /// The last of them, or of the text before; `None` at the start of a text.
    previous: Option<u8>,
}

#[derive(Clone, Copy, Debug)]
struct Thread {
    state: StateID,
    /// Bytes scanned when its match began.
    start: u64,
}

/// A pattern that was completed while scanning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PatternMatch {
    pub(crate) index: usize,
    /// Bytes of the piece up to and including the last of the match.
    pub(crate) end: usize,
    pub(crate) length: usize,
}

impl StopPatterns {
    /// Compiles the patterns, in the caller's order.
    pub(crate) fn new(patterns: Vec<String>) -> Result<Self, Error> {
        let mut parsed = Vec::with_capacity(patterns.len());
        for (index, pattern) in patterns.iter().enumerate() {
            let refuse = |reason: &str| Error::StopPattern { index, reason: reason.to_owned() };
            let tree = regex_syntax::parse(pattern).map_err(|error| {
                let text = error.to_string();
                refuse(text.rsplit_once("error: ").map_or(text.as_str(), |(_, reason)| reason))
            })?;
            if tree.properties().minimum_len() == Some(0) {
                return Err(refuse("it matches the empty text, that is everywhere"));
            }
            let mut looks = tree.properties().look_set().iter();
            if !looks.all(|look| matches!(look, hir::Look::Start | hir::Look::StartLF)) {
                return Err(refuse(ASSERTIONS));
            }
            parsed.push(tree);
        }
        let config =
            Config::new().nfa_size_limit(Some(MAX_NFA_BYTES)).which_captures(WhichCaptures::None);
        let nfa =
            Compiler::new().configure(config).build_many_from_hir(&parsed).map_err(|error| {
                match error.size_limit() {
                    Some(limit) => Error::StopPatternsTooLarge { limit },
                    None => Error::StopPattern { index: 0, reason: error.to_string() },
                }
            })?;
        let begins = beginnings(&nfa);
        Ok(Self { patterns, nfa, begins })
    }

    pub(crate) fn get(&self, index: usize) -> Option<&str> {
        self.patterns.get(index).map(String::as_str)
    }

    pub(crate) fn len(&self) -> usize {
        self.patterns.len()
    }

    /// Moves `state` over `bytes`, up to the first byte that completes a pattern.
    ///
    /// Of several completed there, the one that begins first wins, and of equal ones the first given.
    pub(crate) fn scan(&self, state: &mut PatternState, bytes: &[u8]) -> Option<PatternMatch> {
        bytes.iter().enumerate().find_map(|(at, &byte)| {
            let (start, index) = self.step(state, byte)?;
            let length = (state.position - start) as usize;
            Some(PatternMatch { index, end: at + 1, length })
        })
    }

    /// Takes one byte. Returns where the match that it completes begins, and its pattern.
    fn step(&self, state: &mut PatternState, byte: u8) -> Option<(u64, usize)> {
        if self.begins[usize::from(byte)] {
            let start = state.position;
            state.mark_all();
            state.enter(&self.nfa, self.nfa.start_anchored(), start);
            state.threads.append(&mut state.next);
        }
        state.position += 1;
        state.previous = Some(byte);
        if state.threads.is_empty() {
            return None;
        }
        state.forget_marks();
        let mut best: Option<(u64, usize)> = None;
        for index in 0..state.threads.len() {
            let Thread { state: from, start } = state.threads[index];
            if let Some(to) = after(self.nfa.state(from), byte)
                && let Some(pattern) = state.enter(&self.nfa, to, start)
            {
                let found = (start, pattern);
                best = Some(best.map_or(found, |best| best.min(found)));
            }
        }
        std::mem::swap(&mut state.threads, &mut state.next);
        state.next.clear();
        best
    }
}

impl PatternState {
    /// The state at a place of a text that follows `previous`.
    pub(crate) fn after(previous: Option<u8>) -> Self {
        Self { previous, ..Self::default() }
    }

    /// Number of bytes at the end of the text that may be the beginning of a match.
    pub(crate) fn held_bytes(&self) -> usize {
        self.threads.first().map_or(0, |thread| (self.position - thread.start) as usize)
    }

    fn forget_marks(&mut self) {
        self.round = self.round.wrapping_add(1);
        if self.round == 0 {
            self.seen.fill(0);
            self.round = 1;
        }
    }

    /// Marks the states that have a thread: one that begins later adds nothing.
    fn mark_all(&mut self) {
        self.forget_marks();
        for index in 0..self.threads.len() {
            let state = self.threads[index].state.as_usize();
            if self.seen.len() <= state {
                self.seen.resize(state + 1, 0);
            }
            self.seen[state] = self.round;
        }
    }

    /// Adds threads for all states that `from` leads to without a byte, unless they have one.
    ///
    /// Returns the first pattern that is complete there.
    fn enter(&mut self, nfa: &NFA, from: StateID, start: u64) -> Option<usize> {
        if self.seen.len() < nfa.states().len() {
            self.seen.resize(nfa.states().len(), 0);
        }
        let mut complete: Option<usize> = None;
        self.pending.push(from);
        while let Some(state) = self.pending.pop() {
            let mark = &mut self.seen[state.as_usize()];
            if *mark == self.round {
                continue;
            }
            *mark = self.round;
            match nfa.state(state) {
                State::ByteRange { .. } | State::Sparse(_) | State::Dense(_) => {
                    self.next.push(Thread { state, start });
                }
                State::Look { look, next } => {
                    if holds(*look, self.previous) {
                        self.pending.push(*next);
                    }
                }
                State::Union { alternates } => self.pending.extend(alternates),
                State::BinaryUnion { alt1, alt2 } => self.pending.extend([*alt1, *alt2]),
                State::Capture { next, .. } => self.pending.push(*next),
                State::Fail => {}
                State::Match { pattern_id } => {
                    let pattern = pattern_id.as_usize();
                    complete = Some(complete.map_or(pattern, |first| first.min(pattern)));
                }
            }
        }
        complete
    }
}

fn holds(look: Look, previous: Option<u8>) -> bool {
    previous.is_none() || (look == Look::StartLF && previous == Some(b'\n'))
}

fn after(state: &State, byte: u8) -> Option<StateID> {
    match state {
        State::ByteRange { trans } => trans.matches_byte(byte).then_some(trans.next),
        State::Sparse(sparse) => sparse.matches_byte(byte),
        State::Dense(dense) => dense.matches_byte(byte),
        _ => None,
    }
}

/// The bytes that a match can begin with, wherever it begins.
fn beginnings(nfa: &NFA) -> Box<[bool; 256]> {
    let mut begins = Box::new([false; 256]);
    for previous in [None, Some(b'\n')] {
        let mut state = PatternState::after(previous);
        state.forget_marks();
        state.enter(nfa, nfa.start_anchored(), 0);
        for thread in &state.next {
            for byte in 0..=u8::MAX {
                begins[usize::from(byte)] |= after(nfa.state(thread.state), byte).is_some();
            }
        }
    }
    begins
}

impl std::fmt::Debug for StopPatterns {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("StopPatterns").field(&self.patterns).finish()
    }
}
