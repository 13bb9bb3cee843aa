//! Inserting pages.

use crate::arena::Node;
use crate::error::RadixError;
use crate::tokens::common_prefix;
use crate::tree::RadixTree;
use crate::types::{Inserted, NamespaceId, NodeId, PageId, PageOutcome};

impl RadixTree {
    /// Adds the pages of a key: those whose tokens the tree does not hold yet become the tree's.
    /// The last page may be partial. The path is marked as used now.
    ///
    /// * A partial page that is a prefix of a page in the same place adds nothing.
    /// * An unlocked partial page that is a prefix of a new page in the same place leaves the tree
    ///   (`freed`).
    /// * A partial page may be inserted again with more tokens, under the same page id, even while
    ///   locked: its node, with id and locks, then stands for the longer page.
    ///
    /// Only insert pages that hold the KV of all these tokens, and do not change it afterwards.
    ///
    /// # Errors
    /// [`RadixError::PageCount`]; [`RadixError::PageInUse`] if a page to be adopted is in the tree
    /// at another position.
    pub fn insert(
        &mut self,
        namespace: NamespaceId,
        key: &[u32],
        pages: &[PageId],
    ) -> Result<Inserted, RadixError> {
        self.insert_below(namespace, NodeId::ROOT, key, pages)
    }

    /// Like [`Self::insert`], for a key whose first whole pages end at `node`, given only what
    /// comes after them: it costs nothing for the part above. `outcomes` are those of `pages`.
    ///
    /// # Errors
    /// Also [`RadixError::StaleNode`], and [`RadixError::PartialNode`] if the node ends in a
    /// partial page.
    pub fn insert_below(
        &mut self,
        namespace: NamespaceId,
        node: NodeId,
        tail: &[u32],
        pages: &[PageId],
    ) -> Result<Inserted, RadixError> {
        let needed = tail.len().div_ceil(self.page_size);
        if pages.len() != needed {
            return Err(RadixError::PageCount {
                num_tokens: tail.len(),
                page_size: self.page_size,
                needed,
                given: pages.len(),
            });
        }
        if node != NodeId::ROOT {
            let start = self.resolve(node)?;
            if self.is_partial(start) {
                return Err(RadixError::PartialNode { node });
            }
            return self.insert_at(start, tail, pages);
        }
        let root = self.root_of(namespace);
        let inserted = self.insert_at(root, tail, pages);
        self.drop_empty_root(root);
        inserted
    }

    fn root_of(&mut self, namespace: NamespaceId) -> u32 {
        *self.roots.entry(namespace).or_insert_with(|| {
            self.num_roots_made += 1;
            self.arena.insert(Node::root(namespace))
        })
    }

    fn insert_at(
        &mut self,
        start: u32,
        tail: &[u32],
        pages: &[PageId],
    ) -> Result<Inserted, RadixError> {
        let mut outcomes = Vec::with_capacity(pages.len());
        let walk = self.walk(start, tail, |tree_pages| {
            let given = &pages[outcomes.len()..];
            outcomes.extend(
                tree_pages.iter().zip(given).map(|(&tree, &page)| self.known_page(tree, page)),
            );
        });
        let rest = &tail[walk.num_tokens..];
        let rest_pages = &pages[outcomes.len()..];
        self.clock += 1;
        let node = self.split_walk(&walk);
        let mut freed = Vec::new();
        let end = if rest.is_empty() {
            node
        } else {
            let chunk = self.first_chunk(rest);
            let position = self.find_child(node, chunk).unwrap_or_else(|position| position);
            let holder = self.arena[node].children.get(position).copied();
            match holder.filter(|&child| self.first_page(child).starts_with(chunk)) {
                Some(child) => {
                    outcomes.push(self.known_page(self.arena[child].pages[0], rest_pages[0]));
                    if self.first_page(child) == chunk { child } else { node }
                }
                None => self.adopt(node, rest, rest_pages, &mut freed)?,
            }
        };
        outcomes.resize(pages.len(), PageOutcome::Adopted);
        self.touch(end);
        Ok(Inserted { node: self.public_id(end), outcomes, freed })
    }

    /// The outcome of a page whose tokens are in the tree.
    fn known_page(&self, tree_page: PageId, page: PageId) -> PageOutcome {
        if self.owned.contains(page) {
            PageOutcome::Present
        } else {
            PageOutcome::Duplicate { tree_page }
        }
    }

    /// Adds pages below a node none of whose children begins with the first of them. Returns the
    /// last node made.
    fn adopt(
        &mut self,
        parent: u32,
        tokens: &[u32],
        pages: &[PageId],
        freed: &mut Vec<PageId>,
    ) -> Result<u32, RadixError> {
        let prefixes = self.partial_prefixes(parent, self.first_chunk(tokens));
        let grown = prefixes.iter().copied().find(|&leaf| self.arena[leaf].pages[0] == pages[0]);
        self.claim(&pages[usize::from(grown.is_some())..])?;
        let (mut end, mut taken) = (parent, 0);
        if let Some(leaf) = grown {
            self.grow(leaf, tokens);
            (end, taken) = (leaf, 1);
        }
        let num_whole = tokens.len() / self.page_size;
        for range in [taken..num_whole, num_whole.max(taken)..pages.len()] {
            if !range.is_empty() {
                let last = tokens.len().min(range.end * self.page_size);
                end =
                    self.add_leaf(end, &tokens[range.start * self.page_size..last], &pages[range]);
            }
        }
        for leaf in prefixes {
            if grown != Some(leaf) && !self.arena[leaf].is_locked() {
                freed.extend(self.remove_leaf(leaf).pages);
            }
        }
        Ok(end)
    }

    /// Marks pages as the tree's.
    fn claim(&mut self, pages: &[PageId]) -> Result<(), RadixError> {
        for (position, &page) in pages.iter().enumerate() {
            if !self.owned.insert(page) {
                for &claimed in &pages[..position] {
                    self.owned.remove(claimed);
                }
                return Err(RadixError::PageInUse(page));
            }
        }
        Ok(())
    }

    /// Children that are proper prefixes of `chunk`, hence partial pages; the longest first.
    fn partial_prefixes(&self, parent: u32, chunk: &[u32]) -> Vec<u32> {
        let children = &self.arena[parent].children;
        let mut found = Vec::new();
        let mut length = chunk.len();
        // A prefix of `chunk[..length]` is not longer than what `chunk` shares with the sibling on
        // its left.
        while length > 0 {
            let position =
                self.find_child(parent, &chunk[..length]).unwrap_or_else(|position| position);
            let equal = children.get(position).filter(|&&child| {
                length < chunk.len() && *self.first_page(child) == chunk[..length]
            });
            found.extend(equal.copied());
            let Some(left) = position.checked_sub(1) else { break };
            length = common_prefix(self.first_page(children[left]), &chunk[..length]);
        }
        found
    }

    /// Lengthens a partial page, up to a whole one, by the tokens that `tokens` begins with.
    fn grow(&mut self, leaf: u32, tokens: &[u32]) {
        let tokens = self.first_chunk(tokens).to_vec();
        self.unlist(leaf);
        self.unlink(leaf);
        let node = &mut self.arena[leaf];
        node.end += tokens.len() - node.tokens.len();
        node.tokens = tokens;
        self.arena.bump(leaf);
        self.link(leaf);
        self.list(leaf);
    }

    fn add_leaf(&mut self, parent: u32, tokens: &[u32], pages: &[PageId]) -> u32 {
        let node = Node {
            tokens: tokens.to_vec(),
            pages: pages.to_vec(),
            parent,
            end: self.arena[parent].end + tokens.len(),
            last_access: self.clock,
            ..Node::root(self.arena[parent].namespace)
        };
        let leaf = self.arena.insert(node);
        self.link(leaf);
        self.list(leaf);
        leaf
    }

    pub(crate) fn is_partial(&self, index: u32) -> bool {
        !self.arena[index].tokens.len().is_multiple_of(self.page_size)
    }
}
