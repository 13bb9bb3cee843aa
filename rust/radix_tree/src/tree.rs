//! The tree itself: matching, and the changes of structure that the other modules are made of.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use crate::arena::{Arena, NIL, Node};
use crate::page_set::PageSet;
use crate::tokens::common_prefix;
use crate::types::{Donor, Match, NamespaceId, NodeId, PageId, Peek, Watch};

/// A prefix tree from key ids to pages. See the crate's documentation.
///
/// Every node but the roots has at least one page. A node holds either whole pages or exactly one
/// partial page, and the latter has no children. The first pages of siblings differ; they may share
/// leading tokens, and a partial page may be a prefix of a sibling if it was locked when that
/// sibling came.
#[derive(Debug, Clone)]
pub struct RadixTree {
    pub(crate) page_size: usize,
    pub(crate) arena: Arena,
    pub(crate) roots: FxHashMap<NamespaceId, u32>,
    /// Roots made so far: the version of "this namespace has no root".
    pub(crate) num_roots_made: u64,
    /// Every page in the tree.
    pub(crate) owned: PageSet,
    pub(crate) num_locked_pages: usize,
    /// The unlocked leaves by last access: what may be evicted next.
    pub(crate) leaves: BTreeSet<(u64, u32)>,
    /// Counts matches and inserts.
    pub(crate) clock: u64,
}

/// Where a key leaves the tree.
pub(crate) struct Walk {
    /// The deepest node whose whole edge is in the key.
    pub(crate) node: u32,
    /// Child of `node` of whose edge some whole pages are in the key, but not all; and how many.
    pub(crate) inside: Option<(u32, usize)>,
    /// Tokens in whole pages, counted from where the walk began.
    pub(crate) num_tokens: usize,
    /// Node with the page that goes on like the key, and for how many tokens. The page is the first
    /// of the node, or the one at which `inside` ends.
    pub(crate) donor: Option<(u32, usize)>,
    /// The node whose version changes whenever the result of this walk could.
    pub(crate) watched: u32,
}

impl RadixTree {
    /// An empty tree.
    ///
    /// # Panics
    /// If `page_size` is 0.
    pub fn new(page_size: usize) -> Self {
        assert!(page_size > 0, "page_size must be at least 1");
        Self {
            page_size,
            arena: Arena::default(),
            roots: FxHashMap::default(),
            num_roots_made: 0,
            owned: PageSet::default(),
            num_locked_pages: 0,
            leaves: BTreeSet::new(),
            clock: 0,
        }
    }

    /// Tokens per page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Pages in the tree.
    pub fn num_pages(&self) -> usize {
        self.owned.len()
    }

    /// Pages on locked paths.
    pub fn num_locked_pages(&self) -> usize {
        self.num_locked_pages
    }

    /// Pages that [`Self::evict`] could free now.
    pub fn num_evictable_pages(&self) -> usize {
        self.num_pages() - self.num_locked_pages
    }

    /// Nodes in the tree, one root per namespace included.
    pub fn num_nodes(&self) -> usize {
        self.arena.len()
    }

    /// Namespaces that have pages.
    pub fn num_namespaces(&self) -> usize {
        self.roots.len()
    }

    /// Whether the tree owns a page.
    pub fn contains_page(&self, page: PageId) -> bool {
        self.owned.contains(page)
    }

    /// All pages in the tree, in no particular order.
    pub fn pages(&self) -> impl Iterator<Item = PageId> {
        self.arena.iter().flat_map(|(_, node)| node.pages.iter().copied())
    }

    /// Finds the longest cached prefix of `key` and marks it as used now. Slice the key to cap the
    /// match.
    ///
    /// Nodes are split so that `node` stands for exactly the shared pages and `donor.node` for
    /// these and the donor page. What is returned may leave the tree at the next [`Self::insert`]
    /// or [`Self::evict`] unless it is locked before.
    pub fn match_prefix(&mut self, namespace: NamespaceId, key: &[u32]) -> Match {
        let Some(&root) = self.roots.get(&namespace) else {
            return Match { node: NodeId::ROOT, pages: Vec::new(), donor: None, num_tokens: 0 };
        };
        let mut pages = Vec::new();
        let walk = self.walk(root, key, |shared| pages.extend_from_slice(shared));
        self.clock += 1;
        let node = self.split_walk(&walk);
        self.touch(node);
        let donor = walk.donor.map(|(mut donor, num_tokens)| {
            if self.arena[donor].pages.len() > 1 {
                donor = self.split(donor, 1);
            }
            self.touch(donor);
            let page = self.arena[donor].pages[0];
            Donor { node: self.arena.id(donor), page, num_tokens: num_tokens as u32 }
        });
        let num_tokens = walk.num_tokens + walk.donor.map_or(0, |(_, num_tokens)| num_tokens);
        Match { node: self.public_id(node), pages, donor, num_tokens }
    }

    /// Measures what [`Self::match_prefix`] would find, without changing anything.
    pub fn peek(&self, namespace: NamespaceId, key: &[u32]) -> Peek {
        match self.roots.get(&namespace) {
            Some(&root) => self.peek_from(root, key),
            None => Peek {
                num_tokens: 0,
                watch: Watch { slot: NIL, version: self.num_roots_made, anchor: NodeId::ROOT },
            },
        }
    }

    /// Whether a measured match still has the same length. Constant time; false may be a false
    /// alarm, true never is.
    pub fn is_current(&self, watch: Watch) -> bool {
        if watch.slot == NIL {
            return watch.version == self.num_roots_made;
        }
        self.arena.version(watch.slot) == watch.version
    }

    /// Measures a match again if it has changed, resuming at the deepest node of the former match
    /// that is left. Returns whether it had to.
    ///
    /// `namespace` and `key` must be those that `peek` was made with.
    ///
    /// # Panics
    /// May panic if the key is another one.
    pub fn refresh(&self, namespace: NamespaceId, key: &[u32], peek: &mut Peek) -> bool {
        if self.is_current(peek.watch) {
            return false;
        }
        *peek = match self.arena.resolve(peek.watch.anchor) {
            Some(anchor) => self.peek_from(anchor, key),
            None => self.peek(namespace, key),
        };
        true
    }

    fn peek_from(&self, start: u32, key: &[u32]) -> Peek {
        let begin = self.arena[start].end;
        let walk = self.walk(start, &key[begin..], |_| {});
        let watch = Watch {
            slot: walk.watched,
            version: self.arena.version(walk.watched),
            anchor: self.arena.id(walk.node),
        };
        let donated = walk.donor.map_or(0, |(_, num_tokens)| num_tokens);
        Peek { num_tokens: begin + walk.num_tokens + donated, watch }
    }

    /// Follows `tail` down from a node of whole pages, showing the pages that it passes to `visit`.
    pub(crate) fn walk(&self, start: u32, tail: &[u32], mut visit: impl FnMut(&[PageId])) -> Walk {
        let mut node = start;
        let mut num_tokens = 0;
        loop {
            let rest = &tail[num_tokens..];
            let chunk = self.first_chunk(rest);
            let position = match self.find_child(node, chunk) {
                Ok(position) if chunk.len() == self.page_size => {
                    let child = self.arena[node].children[position];
                    let edge = &self.arena[child];
                    let common = common_prefix(&edge.tokens, rest);
                    let whole = common / self.page_size;
                    visit(&edge.pages[..whole]);
                    num_tokens += whole * self.page_size;
                    if whole == edge.pages.len() {
                        node = child;
                        continue;
                    }
                    let donated = common % self.page_size;
                    let donor = (donated > 0).then_some((child, donated));
                    let inside = Some((child, whole));
                    return Walk { node, inside, num_tokens, donor, watched: child };
                }
                Ok(position) | Err(position) => position,
            };
            let donor = self.nearest_child(node, position, chunk);
            let watched = self.left_of(node, position);
            return Walk { node, inside: None, num_tokens, donor, watched };
        }
    }

    /// The tokens of a run that fall into its first page.
    pub(crate) fn first_chunk<'a>(&self, tokens: &'a [u32]) -> &'a [u32] {
        &tokens[..tokens.len().min(self.page_size)]
    }

    /// Tokens of a node's first page.
    pub(crate) fn first_page(&self, index: u32) -> &[u32] {
        self.first_chunk(&self.arena[index].tokens)
    }

    /// Position of the child with exactly this first page, or where it would be.
    pub(crate) fn find_child(&self, parent: u32, chunk: &[u32]) -> Result<usize, usize> {
        self.arena[parent].children.binary_search_by(|&child| self.first_page(child).cmp(chunk))
    }

    /// The child that shares the most leading tokens with `chunk`, whose sorted position is given:
    /// one of the neighbours.
    fn nearest_child(&self, parent: u32, position: usize, chunk: &[u32]) -> Option<(u32, usize)> {
        let children = &self.arena[parent].children;
        let neighbours = [position.checked_sub(1), Some(position)];
        neighbours
            .into_iter()
            .filter_map(|neighbour| children.get(neighbour?))
            .map(|&child| (child, common_prefix(self.first_page(child), chunk)))
            .filter(|&(_, num_tokens)| num_tokens > 0)
            .max_by_key(|&(_, num_tokens)| num_tokens)
    }

    /// The node whose version stands for the gap before a position among the children: the left
    /// sibling, or the parent.
    fn left_of(&self, parent: u32, position: usize) -> u32 {
        match position.checked_sub(1) {
            Some(left) => self.arena[parent].children[left],
            None => parent,
        }
    }

    /// Makes the walk's whole pages end at a node, and returns it.
    pub(crate) fn split_walk(&mut self, walk: &Walk) -> u32 {
        match walk.inside {
            Some((child, num_pages)) => self.split(child, num_pages),
            None => walk.node,
        }
    }

    /// Cuts the first `num_pages` pages off a node and makes them its parent, which is returned.
    ///
    /// The lower part keeps the slot, hence its id, its locks and its place in the order of
    /// eviction.
    fn split(&mut self, index: u32, num_pages: usize) -> u32 {
        let num_tokens = num_pages * self.page_size;
        let parent = self.arena[index].parent;
        let position = self
            .find_child(parent, self.first_page(index))
            .expect("broken invariant: a node is among its parent's children");
        let node = &mut self.arena[index];
        let upper = Node {
            end: node.end - node.tokens.len() + num_tokens,
            tokens: take_front(&mut node.tokens, num_tokens),
            pages: take_front(&mut node.pages, num_pages),
            children: vec![index],
            parent,
            namespace: node.namespace,
            locks: 0,
            locked_children: u32::from(node.is_locked()),
            last_access: 0,
        };
        let upper = self.arena.insert(upper);
        self.arena[parent].children[position] = upper;
        self.arena[index].parent = upper;
        self.arena.bump(index);
        upper
    }

    /// Puts a node among its parent's children, at the place that its first page demands.
    pub(crate) fn link(&mut self, index: u32) {
        let parent = self.arena[index].parent;
        let position = self
            .find_child(parent, self.first_page(index))
            .expect_err("broken invariant: siblings have different first pages");
        self.unlist(parent);
        self.arena.bump(self.left_of(parent, position));
        self.arena[parent].children.insert(position, index);
    }

    /// Takes a node out of its parent's children.
    pub(crate) fn unlink(&mut self, index: u32) {
        let parent = self.arena[index].parent;
        let position = self
            .find_child(parent, self.first_page(index))
            .expect("broken invariant: a node is among its parent's children");
        self.arena.bump(self.left_of(parent, position));
        self.arena[parent].children.remove(position);
    }

    /// Marks a node as used now.
    pub(crate) fn touch(&mut self, index: u32) {
        self.unlist(index);
        self.arena[index].last_access = self.clock;
        self.list(index);
    }

    /// Adds a node to the order of eviction if it is an unlocked leaf.
    pub(crate) fn list(&mut self, index: u32) {
        let node = &self.arena[index];
        if node.is_evictable_leaf() {
            self.leaves.insert((node.last_access, index));
        }
    }

    /// Takes a node out of the order of eviction, if it is there.
    pub(crate) fn unlist(&mut self, index: u32) {
        let node = &self.arena[index];
        if node.is_evictable_leaf() {
            self.leaves.remove(&(node.last_access, index));
        }
    }

    /// The id of a node as callers know it.
    pub(crate) fn public_id(&self, index: u32) -> NodeId {
        if self.arena[index].is_root() { NodeId::ROOT } else { self.arena.id(index) }
    }
}

/// Cuts the first `count` elements off a vector; neither part keeps spare capacity.
fn take_front<T>(vector: &mut Vec<T>, count: usize) -> Vec<T> {
    let back = vector.split_off(count);
    let mut front = std::mem::replace(vector, back);
    front.shrink_to_fit();
    front
}
