//! Stop strings, compiled: an Aho-Corasick automaton over bytes.
//!
//! The automaton is our own because the depth of its state is the number of bytes to hold back, and
//! the `aho-corasick` crate keeps that to itself. Nodes hold their children as a linked list: 24
//! bytes per byte of stop string, whatever the alphabet, built for each request in microseconds.

use crate::Error;

/// A state of the automaton; the root when nothing is held back.
pub(crate) type State = u32;

pub(crate) const ROOT: State = 0;
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Node {
    byte: u8,
    /// First child, or 0: the root is nobody's child.
    child: u32,
    /// Next child of the same parent, or 0.
    sibling: u32,
    /// Node of the longest proper suffix that is in the trie.
    fail: u32,
    /// Bytes from the root.
    depth: u32,
    /// The longest stop string that ends here, or `NONE`.
    matched: u32,
}

/// The stop strings of a request. Immutable.
pub(crate) struct StopStrings {
    strings: Vec<String>,
    nodes: Vec<Node>,
    /// Child of the root for each byte, or 0.
    starts: Box<[u32; 256]>,
}

/// A stop string that was completed while scanning.
pub(crate) struct Match {
    pub(crate) index: usize,
    /// Bytes scanned up to and including the last of the match.
    pub(crate) end: usize,
}

impl StopStrings {
    /// Compiles the strings, in the caller's order; none may be empty.
    pub(crate) fn new(strings: Vec<String>) -> Result<Self, Error> {
        let mut stops = Self { strings, nodes: Vec::new(), starts: Box::new([0; 256]) };
        stops.push_node(0, 0);
        for index in 0..stops.strings.len() {
            stops.insert(index)?;
        }
        stops.link();
        Ok(stops)
    }

    pub(crate) fn get(&self, index: usize) -> Option<&str> {
        self.strings.get(index).map(String::as_str)
    }

    pub(crate) fn len(&self) -> usize {
        self.strings.len()
    }

    /// Number of bytes at the end of the text that may be the beginning of a stop string.
    pub(crate) fn held_bytes(&self, state: State) -> usize {
        self.nodes[state as usize].depth as usize
    }

    /// Moves `state` over `bytes`, up to the first byte that completes a stop string.
    pub(crate) fn scan(&self, state: &mut State, bytes: &[u8]) -> Option<Match> {
        let mut node = *state;
        for (position, &byte) in bytes.iter().enumerate() {
            node = self.step(node, byte);
            if node != ROOT {
                let matched = self.nodes[node as usize].matched;
                if matched != NONE {
                    *state = node;
                    return Some(Match { index: matched as usize, end: position + 1 });
                }
            }
        }
        *state = node;
        None
    }

    fn step(&self, mut node: State, byte: u8) -> State {
        while node != ROOT {
            let child = self.child(node, byte);
            if child != 0 {
                return child;
            }
            node = self.nodes[node as usize].fail;
        }
        self.starts[usize::from(byte)]
    }

    fn child(&self, node: State, byte: u8) -> u32 {
        if node == ROOT {
            return self.starts[usize::from(byte)];
        }
        let mut child = self.nodes[node as usize].child;
        while child != 0 && self.nodes[child as usize].byte != byte {
            child = self.nodes[child as usize].sibling;
        }
        child
    }

    fn push_node(&mut self, byte: u8, depth: u32) -> u32 {
        let index = self.nodes.len() as u32;
        self.nodes.push(Node { byte, child: 0, sibling: 0, fail: ROOT, depth, matched: NONE });
        index
    }

    fn insert(&mut self, index: usize) -> Result<(), Error> {
        if self.strings[index].is_empty() {
            return Err(Error::EmptyStopString { index });
        }
        let mut node = ROOT;
        for position in 0..self.strings[index].len() {
            let byte = self.strings[index].as_bytes()[position];
            let mut child = self.child(node, byte);
            if child == 0 {
                child = self.push_node(byte, position as u32 + 1);
                if node == ROOT {
                    self.starts[usize::from(byte)] = child;
                } else {
                    self.nodes[child as usize].sibling = self.nodes[node as usize].child;
                    self.nodes[node as usize].child = child;
                }
            }
            node = child;
        }
        let matched = &mut self.nodes[node as usize].matched;
        *matched = (*matched).min(index as u32);
        Ok(())
    }

    /// Sets `fail` and inherits `matched`, breadth first: a node's `fail` is nearer to the root.
    fn link(&mut self) {
        let mut queue: Vec<u32> = self.starts.iter().copied().filter(|&start| start != 0).collect();
        let mut next = 0;
        while next < queue.len() {
            let parent = queue[next] as usize;
            next += 1;
            let mut child = self.nodes[parent].child;
            while child != 0 {
                let node = self.nodes[child as usize];
                let fail = self.step(self.nodes[parent].fail, node.byte);
                self.nodes[child as usize].fail = fail;
                if node.matched == NONE {
                    self.nodes[child as usize].matched = self.nodes[fail as usize].matched;
                }
                queue.push(child);
                child = node.sibling;
            }
        }
    }
}

impl std::fmt::Debug for StopStrings {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("StopStrings").field(&self.strings).finish()
    }
}
