//! The paged KV pool, in a layout made for dot products.
//!
//! `[layer][page][kv head]`, then per group of 16 tokens: keys `[word of D][token]`, values
//! `[word of tokens][D]`. So one vector of key words is 16 tokens' share of their scores, and one
//! vector of value words 16 dimensions' share of an output. A page size that is no multiple of 16
//! is stored plainly, `[token][key, value][D]`, and brought into groups when it is read.

use std::sync::Arc;

use crate::error::CpuError;
use crate::memory::Region;
use crate::populate::{PoolUsage, Population};
use crate::simd::LANES;
use crate::weights::Element;

/// Largest head that the kernels have room for.
pub const MAX_HEAD_DIM: usize = 512;

/// Size of a pool; page 0 is padding.
#[derive(Clone, Copy, Debug)]
pub struct KvSpec {
    /// Layers of the model.
    pub num_layers: usize,
    /// Heads of keys and values.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Pages, page 0 included.
    pub num_pages: usize,
    /// Tokens of a page.
    pub page_size: usize,
}

/// Where a layer's keys and values lie.
#[derive(Clone, Copy)]
pub(crate) struct KvLayout {
    pub(crate) num_pages: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) page_size: usize,
    pub(crate) head_dim: usize,
    /// Rounded up to whole vectors; what is added is zero.
    pub(crate) padded_dim: usize,
    pub(crate) dim_words: usize,
    per_word: usize,
    grouped: bool,
}

impl KvLayout {
    pub(crate) fn new(spec: KvSpec, element: Element) -> KvLayout {
        let padded_dim = spec.head_dim.next_multiple_of(LANES);
        KvLayout {
            num_pages: spec.num_pages,
            num_kv_heads: spec.num_kv_heads,
            page_size: spec.page_size,
            head_dim: spec.head_dim,
            padded_dim,
            dim_words: padded_dim / element.per_word(),
            per_word: element.per_word(),
            grouped: spec.page_size.is_multiple_of(LANES),
        }
    }

    /// Whether pages consist of groups.
    pub(crate) fn is_grouped(self) -> bool {
        self.grouped
    }

    /// Words of the keys, or values, of a group.
    #[inline(always)]
    pub(crate) fn group_words(self) -> usize {
        LANES * self.dim_words
    }

    /// Words of one head's page.
    #[inline(always)]
    pub(crate) fn head_words(self) -> usize {
        2 * self.page_size * self.dim_words
    }

    pub(crate) fn page_words(self) -> usize {
        self.num_kv_heads * self.head_words()
    }

    pub(crate) fn layer_words(self) -> usize {
        self.num_pages * self.page_words()
    }

    /// First word of a head's page within its layer.
    #[inline(always)]
    pub(crate) fn head_start(self, page: usize, head: usize) -> usize {
        assert!(page < self.num_pages && head < self.num_kv_heads);
        (page * self.num_kv_heads + head) * self.head_words()
    }

    /// First word of the group that holds token `offset` of a head's page.
    #[inline(always)]
    pub(crate) fn group_start(self, page: usize, head: usize, offset: usize) -> usize {
        self.head_start(page, head) + offset / LANES * 2 * self.group_words()
    }

    /// First word of a token's keys in a plain page; its values follow.
    #[inline(always)]
    pub(crate) fn plain_start(self, page: usize, head: usize, offset: usize) -> usize {
        self.head_start(page, head) + offset * 2 * self.dim_words
    }

    /// Element of dimension `dim` of token `lane`'s values, counted from the start of the group's.
    #[inline(always)]
    pub(crate) fn value_element(self, lane: usize, dim: usize) -> usize {
        (lane / self.per_word * self.padded_dim + dim) * self.per_word + lane % self.per_word
    }
}

/// Keys and values of all layers.
pub(crate) struct KvPool {
    pub(crate) layout: KvLayout,
    num_layers: usize,
    words: Region,
    usage: Arc<PoolUsage>,
}

impl KvPool {
    /// Reserve a pool; memory is taken as pages are written, or ahead of that by its `Population`.
    ///
    /// # Errors
    /// A size is zero or too large.
    pub(crate) fn new(spec: KvSpec, element: Element) -> Result<KvPool, CpuError> {
        let KvSpec { num_layers, num_kv_heads, head_dim, num_pages, page_size } = spec;
        if [num_layers, num_kv_heads, head_dim, num_pages, page_size].contains(&0) {
            return Err(CpuError::invalid(format!("a KV pool of {spec:?} is empty")));
        }
        if head_dim > MAX_HEAD_DIM {
            return Err(CpuError::invalid(format!(
                "head_dim is {head_dim}, the CPU kernels take at most {MAX_HEAD_DIM}; use the \
                 torch backend"
            )));
        }
        let layout = KvLayout::new(spec, element);
        let words = Region::new(num_layers * layout.layer_words());
        Ok(KvPool { layout, num_layers, words, usage: Arc::default() })
    }

    pub(crate) fn num_layers(&self) -> usize {
        self.num_layers
    }

    pub(crate) fn num_bytes(&self) -> usize {
        4 * self.words.len()
    }

    pub(crate) fn page_bytes(&self) -> usize {
        4 * self.num_layers * self.layout.page_words()
    }

    /// The pool's memory that may be taken ahead.
    pub(crate) fn population(&self) -> Population {
        Population::new(&self.words, self.num_layers, self.page_bytes(), Arc::clone(&self.usage))
    }

    /// What steps tell of themselves.
    pub(crate) fn usage(&self) -> &PoolUsage {
        &self.usage
    }

    /// Set every word.
    pub(crate) fn fill(&mut self, word: u32) {
        self.words.as_mut_slice().fill(word);
    }

    /// First word of a layer.
    pub(crate) fn layer(&mut self, layer: usize) -> *mut u32 {
        assert!(layer < self.num_layers);
        // SAFETY: the region holds every layer.
        unsafe { self.words.as_mut_ptr().add(layer * self.layout.layer_words()) }
    }

    /// Copy a page's leading tokens, all layers; tokens after them become arbitrary.
    pub(crate) fn move_page(&mut self, source: usize, destination: usize, num_tokens: usize) {
        let layout = self.layout;
        assert!(source.max(destination) < layout.num_pages && num_tokens <= layout.page_size);
        let unit = if layout.is_grouped() { LANES } else { 1 };
        let copied = num_tokens.next_multiple_of(unit) * 2 * layout.dim_words;
        let words = self.words.as_mut_slice();
        for layer in words.chunks_exact_mut(layout.layer_words()) {
            for head in 0..layout.num_kv_heads {
                let from = layout.head_start(source, head);
                layer.copy_within(from..from + copied, layout.head_start(destination, head));
            }
        }
    }
}
