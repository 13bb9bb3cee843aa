//! Weights in the form that the kernels read: packed panels, embedding rows, norm vectors, rotary
//! tables.
//!
//! A linear's output columns lie in panels of 64, each part of a fused linear starting a panel:
//! `[panel][word of K][column]`, so that one panel is one stream of memory. A word holds one
//! column's elements `2k, 2k + 1` (bfloat16) or `k` (float32).

use crate::error::CpuError;
use crate::memory::{Region, Slabs};

/// Columns of a panel.
pub(crate) const PANEL: usize = 64;

/// What weights, operands and KV are stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// Two to a word; products are summed in float32.
    Bf16,
    /// One to a word.
    F32,
}

impl Element {
    pub(crate) fn per_word(self) -> usize {
        match self {
            Element::Bf16 => 2,
            Element::F32 => 1,
        }
    }
}

/// Bytes of a checkpoint tensor's elements, little-endian.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    element: Element,
    bytes: &'a [u8],
}

impl<'a> Source<'a> {
    /// Elements of a type.
    pub fn new(element: Element, bytes: &'a [u8]) -> Source<'a> {
        Source { element, bytes }
    }

    fn element_bytes(self) -> usize {
        4 / self.element.per_word()
    }

    fn get(self, index: usize) -> f32 {
        let at = index * self.element_bytes();
        match self.element {
            Element::Bf16 => {
                let bits = u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]);
                f32::from_bits(u32::from(bits) << 16)
            }
            Element::F32 => f32::from_bits(self.word(at)),
        }
    }

    fn word(self, at: usize) -> u32 {
        let bytes = &self.bytes[at..at + 4];
        u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }

    /// The word of `count` elements from `index` on, in a type.
    fn packed(self, element: Element, index: usize, count: usize) -> u32 {
        if element == self.element && count == element.per_word() {
            return self.word(index * self.element_bytes());
        }
        let mut row = [0_u32];
        for slot in 0..count {
            set_element(element, &mut row, slot, self.get(index + slot));
        }
        row[0]
    }

    fn check(self, expected: usize) -> Result<(), CpuError> {
        let bytes = expected * self.element_bytes();
        if self.bytes.len() == bytes {
            return Ok(());
        }
        Err(CpuError::invalid(format!("a tensor has {} bytes, not {bytes}", self.bytes.len())))
    }
}

/// float32 values of little-endian bytes.
pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    let source = Source::new(Element::F32, bytes);
    (0..bytes.len() / 4).map(|index| source.get(index)).collect()
}

/// Put `value` at `index` of a row of elements.
fn set_element(element: Element, row: &mut [u32], index: usize, value: f32) {
    match element {
        Element::F32 => row[index] = value.to_bits(),
        Element::Bf16 => {
            let word = &mut row[index / 2];
            let bits = u32::from(crate::simd::bf16_from_f32(value));
            *word = if index.is_multiple_of(2) {
                *word & 0xffff_0000 | bits
            } else {
                *word & 0xffff | bits << 16
            };
        }
    }
}

/// Columns of the output that a panel computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PanelColumns {
    pub(crate) start: usize,
    pub(crate) width: usize,
}

/// A fused linear, `y = x W^T + b`.
pub struct PackedLinear {
    element: Element,
    pub(crate) in_features: usize,
    pub(crate) out_features: usize,
    pub(crate) row_words: usize,
    pub(crate) panels: Vec<PanelColumns>,
    part_panels: Vec<usize>, // the first panel of each part, and the end
    words: Region,
    bias: Option<Region>, // [panel][64]
}

impl PackedLinear {
    /// An empty linear whose parts have these many outputs.
    pub(crate) fn new(
        slabs: &Slabs,
        element: Element,
        in_features: usize,
        parts: &[usize],
        has_bias: bool,
    ) -> PackedLinear {
        let mut panels = Vec::new();
        let mut part_panels = vec![0];
        let mut start = 0;
        for &width in parts {
            for offset in (0..width).step_by(PANEL) {
                let width = PANEL.min(width - offset);
                panels.push(PanelColumns { start: start + offset, width });
            }
            start += width;
            part_panels.push(panels.len());
        }
        let row_words = in_features.div_ceil(element.per_word());
        let words = slabs.allocate(panels.len() * row_words * PANEL);
        let bias = has_bias.then(|| slabs.allocate(panels.len() * PANEL));
        PackedLinear {
            element,
            in_features,
            out_features: start,
            row_words,
            panels,
            part_panels,
            words,
            bias,
        }
    }

    /// Bytes of panels and bias.
    pub fn num_bytes(&self) -> usize {
        4 * (self.words.len() + self.bias.as_ref().map_or(0, Region::len))
    }

    /// Whether gate and up halves consist of panels of their own.
    pub fn halves_are_panels(&self) -> bool {
        let half = self.panels.len() / 2;
        self.panels.len().is_multiple_of(2)
            && self.out_features.is_multiple_of(2)
            && self.panels[half].start == self.out_features / 2
    }

    /// Pack a part's weight, `[outputs, in_features]`.
    ///
    /// # Errors
    /// The tensor has another size.
    pub fn load_weight(&mut self, part: usize, source: Source<'_>) -> Result<(), CpuError> {
        let panels = self.part_panels[part]..self.part_panels[part + 1];
        let outputs: usize = self.panels[panels.clone()].iter().map(|panel| panel.width).sum();
        source.check(outputs * self.in_features)?;
        let panel_words = self.row_words * PANEL;
        let per_word = self.element.per_word();
        let words =
            &mut self.words.as_mut_slice()[panels.start * panel_words..panels.end * panel_words];
        for (index, panel) in words.chunks_exact_mut(panel_words).enumerate() {
            let width = self.panels[panels.start + index].width;
            let first = index * PANEL * self.in_features;
            for (word, columns) in panel.chunks_exact_mut(PANEL).enumerate() {
                for (column, packed) in columns.iter_mut().enumerate().take(width) {
                    let count = per_word.min(self.in_features - word * per_word);
                    let at = first + column * self.in_features + word * per_word;
                    *packed = source.packed(self.element, at, count);
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
        let panels = self.part_panels[part]..self.part_panels[part + 1];
        let outputs: usize = self.panels[panels.clone()].iter().map(|panel| panel.width).sum();
        source.check(outputs)?;
        let bias = self.bias.as_mut().ok_or_else(|| CpuError::invalid("the linear has no bias"))?;
        let values = &mut bias.as_mut_slice()[panels.start * PANEL..];
        for (index, value) in values.iter_mut().enumerate().take(outputs) {
            *value = source.get(index).to_bits();
        }
        Ok(())
    }

    /// Start of a panel, `[row_words][64]`.
    #[inline(always)]
    pub(crate) fn panel(&self, index: usize) -> *const u32 {
        assert!(index < self.panels.len());
        // SAFETY: the region holds every panel.
        unsafe { self.words.as_ptr().add(index * self.row_words * PANEL) }
    }

    /// Bias of a panel's 64 columns, zero beyond its width.
    #[inline(always)]
    pub(crate) fn panel_bias(&self, index: usize) -> Option<*const f32> {
        assert!(index < self.panels.len());
        // SAFETY: the region holds 64 values per panel.
        self.bias.as_ref().map(|bias| unsafe { bias.as_ptr().cast::<f32>().add(index * PANEL) })
    }

    /// Set every word, for measurements.
    pub(crate) fn fill(&mut self, word: u32) {
        self.words.as_mut_slice().fill(word);
    }

    /// All panels, to be read as one stream.
    pub(crate) fn stream(&self) -> &[u32] {
        self.words.as_slice()
    }
}

/// The table of a token embedding.
pub struct Embedding {
    element: Element,
    pub(crate) num_rows: usize,
    pub(crate) width: usize,
    pub(crate) row_words: usize, // whole vectors
    words: Region,
}

impl Embedding {
    pub(crate) fn new(slabs: &Slabs, element: Element, num_rows: usize, width: usize) -> Embedding {
        let row_words = width.next_multiple_of(crate::simd::LANES) / element.per_word();
        let words = slabs.allocate(num_rows * row_words);
        Embedding { element, num_rows, width, row_words, words }
    }

    /// Bytes of the table.
    pub fn num_bytes(&self) -> usize {
        4 * self.words.len()
    }

    /// Take the table, `[rows, width]`.
    ///
    /// # Errors
    /// The tensor has another size.
    pub fn load(&mut self, source: Source<'_>) -> Result<(), CpuError> {
        source.check(self.num_rows * self.width)?;
        let rows = self.words.as_mut_slice().chunks_exact_mut(self.row_words);
        for (index, row) in rows.enumerate() {
            for column in 0..self.width {
                set_element(self.element, row, column, source.get(index * self.width + column));
            }
        }
        Ok(())
    }

    /// Start of a token's row: whole vectors, zero beyond the width.
    #[inline(always)]
    pub(crate) fn row(&self, index: usize) -> *const u32 {
        assert!(index < self.num_rows);
        // SAFETY: the region holds every row.
        unsafe { self.words.as_ptr().add(index * self.row_words) }
    }
}

/// Weight and epsilon of an RMS norm.
pub struct Norm {
    pub(crate) weight: Vec<f32>, // whole vectors, zero beyond the width
    pub(crate) width: usize,
    pub(crate) epsilon: f32,
    element: Element,
}

impl Norm {
    pub(crate) fn new(element: Element, width: usize, epsilon: f32) -> Norm {
        let weight = vec![0.0; width.next_multiple_of(crate::simd::LANES)];
        Norm { weight, width, epsilon, element }
    }

    /// Bytes of the weight.
    pub fn num_bytes(&self) -> usize {
        4 * self.weight.len()
    }

    /// Append `x / rms(x) * weight` in float32; the bits do not depend on the instruction set.
    pub(crate) fn extend_normed(&self, row: &[f32], output: &mut Vec<f32>) {
        let squares: f64 = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        let mean = (squares / self.width as f64) as f32;
        let scale = 1.0 / (mean + self.epsilon).sqrt();
        output.extend(row.iter().zip(&self.weight).map(|(&x, &weight)| x * scale * weight));
    }

    /// Take the weight, rounded as the model's dtype says.
    ///
    /// # Errors
    /// The tensor has another size.
    pub fn load(&mut self, source: Source<'_>) -> Result<(), CpuError> {
        source.check(self.width)?;
        for (index, weight) in self.weight.iter_mut().take(self.width).enumerate() {
            let value = source.get(index);
            *weight = match self.element {
                Element::F32 => value,
                Element::Bf16 => f32::from_bits(u32::from(crate::simd::bf16_from_f32(value)) << 16),
            };
        }
        Ok(())
    }
}

/// Cos and sin by position.
pub struct Rotary {
    pub(crate) half: usize,
    pub(crate) num_positions: usize,
    pub(crate) cos: Vec<f32>, // [positions][half]
    pub(crate) sin: Vec<f32>,
}

impl Rotary {
    pub(crate) fn new(half: usize, cos: Vec<f32>, sin: Vec<f32>) -> Result<Rotary, CpuError> {
        if cos.len() != sin.len() || half == 0 || !cos.len().is_multiple_of(half) {
            return Err(CpuError::invalid(format!(
                "rotary tables of {} and {} values do not fit {half} frequencies",
                cos.len(),
                sin.len()
            )));
        }
        Ok(Rotary { half, num_positions: cos.len() / half, cos, sin })
    }
}
