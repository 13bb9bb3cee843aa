//! Linears in packed panels.
//!
//! Output columns lie in panels of 64, each part of a fused linear starting a panel, so that one panel
//! is one stream of memory: `[word of K][column]`, a word holding one column's elements `2k, 2k + 1`
//! (bfloat16) or `k` (float32); or `[block of K]`, as `blocks` says.

use std::ops::Range;
use std::sync::Arc;

use crate::blocks::{BLOCK, BlockFormat, BlockKind, BlockSource, read_block, store_block};
use crate::error::CpuError;
use crate::memory::{Region, Slabs};
use crate::weights::{Element, Source};

/// Columns of a panel.
pub(crate) const PANEL: usize = 64;

/// How weights of linears are stored, and what they are multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// Elements of the model's type, multiplied with operands of that type.
    Dense,
    /// Blocks, multiplied with operands that are quantised in blocks too.
    Blocks,
}

/// How a panel is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PanelFormat {
    Dense,
    Blocks(BlockFormat),
}

/// Columns of the output that a panel computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PanelColumns {
    pub(crate) start: usize,
    pub(crate) width: usize,
}

/// One part's panels; without words until a block format is loaded.
struct Part {
    panels: Range<usize>,
    format: PanelFormat,
    words: Region,
}

/// A fused linear, `y = x W^T + b`.
pub struct PackedLinear {
    slabs: Arc<Slabs>,
    element: Element,
    pub(crate) storage: Storage,
    pub(crate) in_features: usize,
    pub(crate) out_features: usize,
    pub(crate) panels: Vec<PanelColumns>,
    panel_parts: Vec<usize>,
    parts: Vec<Part>,
    bias: Option<Region>, // [panel][64]
}

impl PackedLinear {
    /// A linear whose parts have these many outputs: zeros if dense, else to be loaded.
    pub(crate) fn new(
        slabs: &Arc<Slabs>,
        (element, storage): (Element, Storage),
        in_features: usize,
        outputs: &[usize],
        has_bias: bool,
    ) -> PackedLinear {
        let mut linear = PackedLinear {
            slabs: Arc::clone(slabs),
            element,
            storage,
            in_features,
            out_features: 0,
            panels: Vec::new(),
            panel_parts: Vec::new(),
            parts: Vec::new(),
            bias: None,
        };
        for &width in outputs {
            let first = linear.panels.len();
            for offset in (0..width).step_by(PANEL) {
                let start = linear.out_features + offset;
                linear.panels.push(PanelColumns { start, width: PANEL.min(width - offset) });
                linear.panel_parts.push(linear.parts.len());
            }
            linear.out_features += width;
            let panels = first..linear.panels.len();
            let words = match storage {
                Storage::Dense => panels.len() * linear.panel_words(PanelFormat::Dense),
                Storage::Blocks => 0,
            };
            let format = PanelFormat::Dense;
            linear.parts.push(Part { panels, format, words: slabs.allocate(words) });
        }
        linear.bias = has_bias.then(|| slabs.allocate(linear.panels.len() * PANEL));
        linear
    }

    /// Words of a dense panel's column.
    #[inline(always)]
    pub(crate) fn row_words(&self) -> usize {
        self.in_features.div_ceil(self.element.per_word())
    }

    /// Blocks of a column.
    #[inline(always)]
    pub(crate) fn num_blocks(&self) -> usize {
        self.in_features.div_ceil(BLOCK)
    }

    fn panel_words(&self, format: PanelFormat) -> usize {
        match format {
            PanelFormat::Dense => self.row_words() * PANEL,
            PanelFormat::Blocks(format) => self.num_blocks() * format.words(),
        }
    }

    /// Whether every part has a weight.
    pub(crate) fn is_loaded(&self) -> bool {
        let empty = self.out_features == 0 || self.in_features == 0;
        empty || self.parts.iter().all(|part| part.words.len() > 0)
    }

    /// Bytes of panels and bias.
    pub fn num_bytes(&self) -> usize {
        let words: usize = self.parts.iter().map(|part| part.words.len()).sum();
        4 * (words + self.bias.as_ref().map_or(0, Region::len))
    }

    /// Whether gate and up halves consist of panels of their own.
    pub fn halves_are_panels(&self) -> bool {
        let half = self.panels.len() / 2;
        self.panels.len().is_multiple_of(2)
            && self.out_features.is_multiple_of(2)
            && self.panels[half].start == self.out_features / 2
    }

    fn num_outputs(&self, part: usize) -> usize {
        let panels = self.parts[part].panels.clone();
        self.panels[panels].iter().map(|panel| panel.width).sum()
    }

    /// Pack a part's weight, `[outputs, in_features]`; with blocks, quantise it to eight bits.
    ///
    /// # Errors
    /// The tensor has another size, or values that are too large to be quantised.
    pub fn load_weight(&mut self, part: usize, source: Source<'_>) -> Result<(), CpuError> {
        if self.storage == Storage::Blocks {
            return self.pack_blocks(part, BlockSource::Values(source));
        }
        source.check(self.num_outputs(part) * self.in_features)?;
        let (row_words, per_word) = (self.row_words(), self.element.per_word());
        let Part { panels, words, .. } = &mut self.parts[part];
        let columns = &self.panels[panels.clone()];
        let panel_words = (row_words * PANEL).max(1);
        for (index, panel) in words.as_mut_slice().chunks_exact_mut(panel_words).enumerate() {
            let first = index * PANEL * self.in_features;
            for (word, packed) in panel.chunks_exact_mut(PANEL).enumerate() {
                for (column, packed) in packed.iter_mut().enumerate().take(columns[index].width) {
                    let count = per_word.min(self.in_features - word * per_word);
                    let at = first + column * self.in_features + word * per_word;
                    *packed = source.packed(self.element, at, count);
                }
            }
        }
        Ok(())
    }

    /// Take a part's weight as a file's blocks, row after row.
    ///
    /// # Errors
    /// The tensor has another size, its rows are no whole blocks, or the linear is dense.
    pub fn load_blocks(
        &mut self,
        part: usize,
        kind: BlockKind,
        bytes: &[u8],
    ) -> Result<(), CpuError> {
        if self.storage == Storage::Dense {
            return Err(CpuError::invalid("blocks are loaded into a dense linear"));
        }
        self.pack_blocks(part, BlockSource::Stored(kind, bytes))
    }

    fn pack_blocks(&mut self, part: usize, source: BlockSource<'_>) -> Result<(), CpuError> {
        source.check(self.num_outputs(part), self.in_features)?;
        let format = source.format();
        let panel_words = self.panel_words(PanelFormat::Blocks(format));
        let Part { panels, format: stored, words } = &mut self.parts[part];
        if words.len() != panels.len() * panel_words {
            *words = self.slabs.allocate(panels.len() * panel_words);
        }
        *stored = PanelFormat::Blocks(format);
        let columns = &self.panels[panels.clone()];
        for (index, panel) in words.as_mut_slice().chunks_exact_mut(panel_words).enumerate() {
            for (block, packed) in panel.chunks_exact_mut(format.words()).enumerate() {
                for column in 0..columns[index].width {
                    let values = source.block(self.in_features, index * PANEL + column, block)?;
                    store_block(format, packed, column, &values);
                }
            }
        }
        Ok(())
    }

    /// Take a part's bias.
    ///
    /// # Errors
    /// The tensor has another size, or the linear has no bias.
    pub fn load_bias(&mut self, part: usize, source: Source<'_>) -> Result<(), CpuError> {
        let outputs = self.num_outputs(part);
        source.check(outputs)?;
        let panels = self.parts[part].panels.clone();
        let bias = self.bias.as_mut().ok_or_else(|| CpuError::invalid("the linear has no bias"))?;
        let values = &mut bias.as_mut_slice()[panels.start * PANEL..];
        for (index, value) in values.iter_mut().enumerate().take(outputs) {
            *value = source.get(index).to_bits();
        }
        Ok(())
    }

    /// How a panel is stored.
    #[inline(always)]
    pub(crate) fn format(&self, panel: usize) -> PanelFormat {
        self.parts[self.panel_parts[panel]].format
    }

    /// Start of a panel: `[row_words][64]` or `[num_blocks][words of the format]`.
    #[inline(always)]
    pub(crate) fn panel(&self, index: usize) -> *const u32 {
        let part = &self.parts[self.panel_parts[index]];
        let words = self.panel_words(part.format);
        let at = (index - part.panels.start) * words;
        assert!(at + words <= part.words.len(), "a part is not loaded");
        // SAFETY: the region holds the panel, as just checked.
        unsafe { part.words.as_ptr().add(at) }
    }

    /// The elements of an output's block, zero beyond `in_features`.
    pub(crate) fn block(&self, output: usize, block: usize) -> [f32; BLOCK] {
        let part = self.parts.iter().position(|part| {
            let last = &self.panels[part.panels.end - 1];
            output < last.start + last.width
        });
        let part = &self.parts[part.expect("no such output")];
        let PanelFormat::Blocks(format) = part.format else {
            panic!("the part is not stored in blocks");
        };
        let column = output - self.panels[part.panels.start].start;
        let at = (column / PANEL * self.num_blocks() + block) * format.words();
        read_block(format, &part.words.as_slice()[at..at + format.words()], column % PANEL)
    }

    /// Bias of a panel's 64 columns, zero beyond its width.
    #[inline(always)]
    pub(crate) fn panel_bias(&self, index: usize) -> Option<*const f32> {
        assert!(index < self.panels.len());
        // SAFETY: the region holds 64 values per panel.
        self.bias.as_ref().map(|bias| unsafe { bias.as_ptr().cast::<f32>().add(index * PANEL) })
    }

    /// Set every word of every part, for measurements.
    pub(crate) fn fill(&mut self, word: u32) {
        self.parts.iter_mut().for_each(|part| part.words.as_mut_slice().fill(word));
    }

    /// The panels of each part, to be read as streams.
    pub(crate) fn streams(&self) -> impl Iterator<Item = &[u32]> {
        self.parts.iter().map(|part| part.words.as_slice())
    }
}
