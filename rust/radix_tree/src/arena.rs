//! Storage of nodes: slots addressed by number and reused.

use std::ops::{Index, IndexMut};

use crate::types::{NamespaceId, NodeId, PageId};

/// No slot: the parent of a root.
pub(crate) const NIL: u32 = u32::MAX;

/// A run of whole pages, or one partial page, or a root (no page).
#[derive(Debug, Clone)]
pub(crate) struct Node {
    /// Key ids of the edge, contiguous so that a match is one comparison of memory.
    pub(crate) tokens: Vec<u32>,
    pub(crate) pages: Vec<PageId>,
    /// Slots of the children, sorted by the tokens of their first pages.
    pub(crate) children: Vec<u32>,
    pub(crate) parent: u32,
    pub(crate) namespace: NamespaceId,
    /// Tokens from the root to the end of the edge.
    pub(crate) end: usize,
    /// Locks taken on this node itself.
    pub(crate) locks: u32,
    /// Children that are locked themselves or have a locked child. So taking or releasing a lock
    /// only climbs to the first ancestor that is locked for another reason.
    pub(crate) locked_children: u32,
    /// When the node was last the end of a match or an insert. What the children were used for is
    /// added when they leave.
    pub(crate) last_access: u64,
}

impl Node {
    pub(crate) fn root(namespace: NamespaceId) -> Self {
        Self {
            tokens: Vec::new(),
            pages: Vec::new(),
            children: Vec::new(),
            parent: NIL,
            namespace,
            end: 0,
            locks: 0,
            locked_children: 0,
            last_access: 0,
        }
    }

    pub(crate) fn is_root(&self) -> bool {
        self.parent == NIL
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.locks > 0 || self.locked_children > 0
    }

    pub(crate) fn is_evictable_leaf(&self) -> bool {
        self.children.is_empty() && !self.is_locked() && !self.is_root()
    }
}

#[derive(Debug, Clone)]
struct Slot {
    /// Counts the lives of the slot: part of every node id.
    generation: u32,
    /// Counts what a watch must notice, over all lives.
    version: u64,
    node: Option<Node>,
}

/// The slots. Indexing an empty slot is a bug of this crate and panics.
#[derive(Debug, Clone, Default)]
pub(crate) struct Arena {
    slots: Vec<Slot>,
    vacant: Vec<u32>,
}

impl Arena {
    pub(crate) fn insert(&mut self, node: Node) -> u32 {
        if let Some(index) = self.vacant.pop() {
            let slot = &mut self.slots[index as usize];
            slot.node = Some(node);
            return index;
        }
        let index =
            u32::try_from(self.slots.len()).expect("broken invariant: more than 2^32 nodes");
        self.slots.push(Slot { generation: 0, version: 0, node: Some(node) });
        index
    }

    pub(crate) fn remove(&mut self, index: u32) -> Node {
        self.retire_id(index);
        self.bump(index);
        self.vacant.push(index);
        self.slots[index as usize].node.take().expect("broken invariant: the slot holds a node")
    }

    /// Makes every id handed out for this node stale, although the node stays.
    pub(crate) fn retire_id(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
    }

    /// Makes every watch on this node stale.
    pub(crate) fn bump(&mut self, index: u32) {
        self.slots[index as usize].version += 1;
    }

    pub(crate) fn version(&self, index: u32) -> u64 {
        self.slots[index as usize].version
    }

    pub(crate) fn id(&self, index: u32) -> NodeId {
        NodeId { index, generation: self.slots[index as usize].generation }
    }

    /// The slot of a node id, if the id is still valid.
    pub(crate) fn resolve(&self, id: NodeId) -> Option<u32> {
        let slot = self.slots.get(id.index as usize)?;
        (slot.generation == id.generation && slot.node.is_some()).then_some(id.index)
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Node)> {
        (0..).zip(&self.slots).filter_map(|(index, slot)| Some((index, slot.node.as_ref()?)))
    }
}

impl Index<u32> for Arena {
    type Output = Node;

    fn index(&self, index: u32) -> &Node {
        self.slots[index as usize].node.as_ref().expect("broken invariant: the slot holds a node")
    }
}

impl IndexMut<u32> for Arena {
    fn index_mut(&mut self, index: u32) -> &mut Node {
        self.slots[index as usize].node.as_mut().expect("broken invariant: the slot holds a node")
    }
}
