//! Weights in the form that the kernels read: embedding rows, norm vectors, rotary tables
//! (`packed_linear` has the linears); and the tensors that they are loaded from.

use crate::error::CpuError;
use crate::memory::{Region, Slabs};

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

    pub(crate) fn get(self, index: usize) -> f32 {
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
    pub(crate) fn packed(self, element: Element, index: usize, count: usize) -> u32 {
        if element == self.element && count == element.per_word() {
            return self.word(index * self.element_bytes());
        }
        let mut row = [0_u32];
        for slot in 0..count {
            set_element(element, &mut row, slot, self.get(index + slot));
        }
        row[0]
    }

    pub(crate) fn check(self, expected: usize) -> Result<(), CpuError> {
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

/// The table of a token embedding.
pub struct Embedding {
    pub(crate) num_rows: usize,
    pub(crate) width: usize,
    /// Of every element that is looked up.
    pub(crate) scale: f32,
    pub(crate) table: Table,
}

/// Where the rows of an embedding are.
pub(crate) enum Table {
    /// Rows of elements.
    Rows(TableRows),
    /// The outputs of a linear of this number, stored in blocks.
    Linear(usize),
}

/// Rows of elements: whole vectors, zero beyond the width.
pub(crate) struct TableRows {
    element: Element,
    row_words: usize,
    words: Region,
}

impl Embedding {
    pub(crate) fn new(
        slabs: &Slabs,
        element: Element,
        (num_rows, width): (usize, usize),
        scale: f32,
    ) -> Embedding {
        let row_words = width.next_multiple_of(crate::simd::LANES) / element.per_word();
        let words = slabs.allocate(num_rows * row_words);
        let table = Table::Rows(TableRows { element, row_words, words });
        Embedding { num_rows, width, scale, table }
    }

    /// The linear whose weight is the table, if it is stored in blocks.
    pub fn linear(&self) -> Option<usize> {
        match self.table {
            Table::Rows(_) => None,
            Table::Linear(linear) => Some(linear),
        }
    }

    /// Bytes of the table; none if a linear holds it.
    pub fn num_bytes(&self) -> usize {
        match &self.table {
            Table::Rows(rows) => 4 * rows.words.len(),
            Table::Linear(_) => 0,
        }
    }

    /// Take the table, `[rows, width]`.
    ///
    /// # Errors
    /// The tensor has another size, or a linear holds the table.
    pub fn load(&mut self, source: Source<'_>) -> Result<(), CpuError> {
        source.check(self.num_rows * self.width)?;
        let Table::Rows(TableRows { element, row_words, words }) = &mut self.table else {
            return Err(CpuError::invalid("the table is a linear's weight: load that"));
        };
        let rows = words.as_mut_slice().chunks_exact_mut(*row_words);
        for (index, row) in rows.enumerate() {
            for column in 0..self.width {
                set_element(*element, row, column, source.get(index * self.width + column));
            }
        }
        Ok(())
    }
}

impl TableRows {
    /// Start of a token's row.
    #[inline(always)]
    pub(crate) fn row(&self, index: usize) -> *const u32 {
        assert!((index + 1) * self.row_words <= self.words.len());
        // SAFETY: the region holds the row, as just checked.
        unsafe { self.words.as_ptr().add(index * self.row_words) }
    }
}

/// Weight and epsilon of an RMS norm.
pub struct Norm {
    pub(crate) weight: Vec<f32>, // with the offset; whole vectors, zero beyond the width
    pub(crate) width: usize,
    pub(crate) epsilon: f32,
    offset: f32,
    element: Element,
}

impl Norm {
    pub(crate) fn new(element: Element, width: usize, epsilon: f32, offset: f32) -> Norm {
        let weight = vec![0.0; width.next_multiple_of(crate::simd::LANES)];
        Norm { weight, width, epsilon, offset, element }
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

    /// Take the weight, rounded as the model's dtype says, and add the offset in float32.
    ///
    /// # Errors
    /// The tensor has another size.
    pub fn load(&mut self, source: Source<'_>) -> Result<(), CpuError> {
        source.check(self.width)?;
        for (index, weight) in self.weight.iter_mut().take(self.width).enumerate() {
            let value = source.get(index);
            let rounded = match self.element {
                Element::F32 => value,
                Element::Bf16 => f32::from_bits(u32::from(crate::simd::bf16_from_f32(value)) << 16),
            };
            *weight = rounded + self.offset;
        }
        Ok(())
    }
}

/// Attention sinks: a score per head.
pub struct Sinks(Norm);

impl Sinks {
    pub(crate) fn new(element: Element, num_heads: usize) -> Sinks {
        Sinks(Norm::new(element, num_heads, 0.0, 0.0))
    }

    /// By head.
    pub(crate) fn scores(&self) -> &[f32] {
        &self.0.weight[..self.0.width]
    }

    /// Bytes of the scores.
    pub fn num_bytes(&self) -> usize {
        self.0.num_bytes()
    }

    /// Take the scores, rounded as the model's dtype says.
    ///
    /// # Errors
    /// The tensor has another size.
    pub fn load(&mut self, source: Source<'_>) -> Result<(), CpuError> {
        self.0.load(source)
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
