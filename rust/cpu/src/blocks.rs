//! Blocks of 32 elements along K: small integers with a scale, and how they lie in a panel.
//!
//! An element is `scale * (code - zero)`, or `scale * code + offset` where a format has offsets; scales
//! and offsets are float16, as in GGUF. A panel's block is `[code word][column]`, then the columns'
//! scales, then their offsets. Word j of a column holds codes `4j .. 4j + 4`; with codes of four bits
//! also `16 + 4j .. 20 + 4j`, in the high halves.

use half::f16;

use crate::error::CpuError;
use crate::packed_linear::PANEL;
use crate::weights::Source;

/// Elements of a block.
pub(crate) const BLOCK: usize = 32;
/// Words that hold a column's scale or offset, by column pairs.
const HALF_WORDS: usize = PANEL / 2;
/// Elements of a block of GGUF's K types.
const SUPER_BLOCK: usize = 256;

/// How a block's elements are stored in a panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockFormat {
    /// Codes of four bits; else of eight.
    pub(crate) nibbles: bool,
    /// Each block has an offset; else codes have a zero.
    pub(crate) has_offset: bool,
}

impl BlockFormat {
    /// Eight bits and a scale.
    pub(crate) const INT8: BlockFormat = BlockFormat { nibbles: false, has_offset: false };

    /// Words of a column's codes.
    pub(crate) const fn code_words(self) -> usize {
        if self.nibbles { BLOCK / 8 } else { BLOCK / 4 }
    }

    /// Words of a panel's block.
    pub(crate) const fn words(self) -> usize {
        let halves = if self.has_offset { 2 } else { 1 };
        self.code_words() * PANEL + halves * HALF_WORDS
    }

    /// The code of zero.
    pub(crate) const fn zero(self) -> i32 {
        match (self.has_offset, self.nibbles) {
            (true, _) => 0,
            (false, true) => 8,
            (false, false) => 128,
        }
    }
}

/// One column's block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Block {
    pub(crate) codes: [u8; BLOCK],
    pub(crate) scale: f16,
    pub(crate) offset: f16,
}

impl Block {
    /// Element by element.
    #[cfg(test)]
    pub(crate) fn value(&self, format: BlockFormat, index: usize) -> f32 {
        element(format, i32::from(self.codes[index]), self.scale.to_f32(), self.offset.to_f32())
    }

    /// Quantise values to eight bits; what is missing of a block counts as zeros.
    fn of_values(values: impl Iterator<Item = f32> + Clone) -> Result<Block, CpuError> {
        let finite = values.clone().all(f32::is_finite);
        let highest = values.clone().fold(0.0_f32, |highest, x| highest.max(x.abs()));
        let scale = if finite { f16::from_f32(highest / 127.0) } else { f16::NAN };
        if scale.is_infinite() {
            return Err(CpuError::invalid(format!(
                "a weight is {highest:e}, beyond what int8 with float16 scales can hold; load the \
                 model without quantization"
            )));
        }
        let step = scale.to_f32();
        let inverse = if step > 0.0 { 1.0 / step } else { 0.0 };
        let mut codes = [128; BLOCK];
        for (code, x) in codes.iter_mut().zip(values) {
            let steps = (x * inverse).round_ties_even().clamp(-127.0, 127.0);
            *code = (steps as i32 + 128) as u8;
        }
        Ok(Block { codes, scale, offset: f16::ZERO })
    }
}

fn element(format: BlockFormat, code: i32, scale: f32, offset: f32) -> f32 {
    let product = scale * (code - format.zero()) as f32;
    if format.has_offset { product + offset } else { product }
}

/// GGUF types that are packed as they are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockKind {
    /// `d * q`, q of four bits less 8.
    Q4_0,
    /// `d * q + m`, q of four bits.
    Q4_1,
    /// `d * q`, q of five bits less 16.
    Q5_0,
    /// `d * q + m`, q of five bits.
    Q5_1,
    /// `d * q`, q of eight bits.
    Q8_0,
    /// Eight blocks `d * s * q - dmin * m`, q of four bits.
    Q4K,
    /// Eight blocks `d * s * q - dmin * m`, q of five bits.
    Q5K,
}

impl BlockKind {
    const NAMES: [(&str, BlockKind); 7] = [
        ("Q4_0", BlockKind::Q4_0),
        ("Q4_1", BlockKind::Q4_1),
        ("Q5_0", BlockKind::Q5_0),
        ("Q5_1", BlockKind::Q5_1),
        ("Q8_0", BlockKind::Q8_0),
        ("Q4_K", BlockKind::Q4K),
        ("Q5_K", BlockKind::Q5K),
    ];

    /// GGUF's names of all of them.
    pub fn names() -> impl Iterator<Item = &'static str> {
        BlockKind::NAMES.into_iter().map(|(name, _)| name)
    }

    /// The type that GGUF calls so.
    ///
    /// # Errors
    /// It has no packed form.
    pub fn named(name: &str) -> Result<BlockKind, CpuError> {
        let found = BlockKind::NAMES.into_iter().find(|(known, _)| *known == name);
        found.map(|(_, kind)| kind).ok_or_else(|| {
            CpuError::invalid(format!(
                "tensors of type {name} have no packed form; dequantise them"
            ))
        })
    }

    pub(crate) fn format(self) -> BlockFormat {
        match self {
            BlockKind::Q8_0 | BlockKind::Q5_0 => BlockFormat::INT8,
            BlockKind::Q4_0 => BlockFormat { nibbles: true, has_offset: false },
            BlockKind::Q4_1 | BlockKind::Q4K => BlockFormat { nibbles: true, has_offset: true },
            BlockKind::Q5_1 | BlockKind::Q5K => BlockFormat { nibbles: false, has_offset: true },
        }
    }

    /// Elements and bytes of a block of the file.
    pub(crate) fn stored_block(self) -> (usize, usize) {
        match self {
            BlockKind::Q4_0 => (BLOCK, 18),
            BlockKind::Q4_1 => (BLOCK, 20),
            BlockKind::Q5_0 => (BLOCK, 22),
            BlockKind::Q5_1 => (BLOCK, 24),
            BlockKind::Q8_0 => (BLOCK, 34),
            BlockKind::Q4K => (SUPER_BLOCK, 144),
            BlockKind::Q5K => (SUPER_BLOCK, 176),
        }
    }

    /// Block `index` of a row of the file.
    pub(crate) fn block(self, row: &[u8], index: usize) -> Block {
        let (elements, bytes) = self.stored_block();
        let per_stored = elements / BLOCK;
        let stored = &row[index / per_stored * bytes..][..bytes];
        let part = index % per_stored;
        match self {
            BlockKind::Q8_0 => {
                let mut codes = [0; BLOCK];
                for (code, byte) in codes.iter_mut().zip(&stored[2..]) {
                    *code = byte ^ 0x80;
                }
                Block { codes, scale: half(stored, 0), offset: f16::ZERO }
            }
            BlockKind::Q4_0 => small_block(stored, None, &stored[2..], 0),
            BlockKind::Q4_1 => small_block(stored, None, &stored[4..], 0).with_offset(stored),
            // Five bits less 16, as eight bits less 128.
            BlockKind::Q5_0 => small_block(stored, Some(&stored[2..6]), &stored[6..], 112),
            BlockKind::Q5_1 => {
                small_block(stored, Some(&stored[4..8]), &stored[8..], 0).with_offset(stored)
            }
            BlockKind::Q4K => super_block(stored, part, None, &stored[16..]),
            BlockKind::Q5K => super_block(stored, part, Some(&stored[16..48]), &stored[48..]),
        }
    }
}

impl Block {
    fn with_offset(self, stored: &[u8]) -> Block {
        Block { offset: half(stored, 2), ..self }
    }
}

fn half(bytes: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// A block of GGUF's simple types: element i in the low half of byte i, element 16 + i in the high
/// half; fifth bits, if any, in a word of 32.
fn small_block(stored: &[u8], fifth: Option<&[u8]>, low: &[u8], zero: u8) -> Block {
    let fifth =
        fifth.map_or(0, |bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
    let mut codes = [0; BLOCK];
    for (index, code) in codes.iter_mut().enumerate() {
        let bits = low[index % 16] >> (index / 16 * 4) & 15;
        *code = (bits | ((fifth >> index & 1) as u8) << 4) + zero;
    }
    Block { codes, scale: half(stored, 0), offset: f16::ZERO }
}

/// One of the eight blocks of a K type. Scales and minima have six bits each, those of the last four
/// blocks split over the twelve bytes; blocks 2i and 2i + 1 share bytes, low and high halves.
fn super_block(stored: &[u8], part: usize, fifth: Option<&[u8]>, low: &[u8]) -> Block {
    let packed = &stored[4..16];
    let (scale, minimum) = if part < 4 {
        (packed[part] & 63, packed[part + 4] & 63)
    } else {
        let high = (packed[part - 4] >> 6, packed[part] >> 6);
        (packed[part + 4] & 15 | high.0 << 4, packed[part + 4] >> 4 | high.1 << 4)
    };
    let mut codes = [0; BLOCK];
    for (index, code) in codes.iter_mut().enumerate() {
        let bits = low[part / 2 * BLOCK + index] >> (part % 2 * 4) & 15;
        let high = fifth.map_or(0, |bytes| bytes[index] >> part & 1);
        *code = bits | high << 4;
    }
    Block {
        codes,
        scale: f16::from_f32(half(stored, 0).to_f32() * f32::from(scale)),
        offset: f16::from_f32(-half(stored, 2).to_f32() * f32::from(minimum)),
    }
}

/// A part's weight `[outputs, in_features]`, block by block.
#[derive(Clone, Copy)]
pub(crate) enum BlockSource<'a> {
    /// Elements, to be quantised to eight bits.
    Values(Source<'a>),
    /// Blocks of a file.
    Stored(BlockKind, &'a [u8]),
}

impl BlockSource<'_> {
    pub(crate) fn format(self) -> BlockFormat {
        match self {
            BlockSource::Values(_) => BlockFormat::INT8,
            BlockSource::Stored(kind, _) => kind.format(),
        }
    }

    pub(crate) fn check(self, outputs: usize, in_features: usize) -> Result<(), CpuError> {
        match self {
            BlockSource::Values(source) => source.check(outputs * in_features),
            BlockSource::Stored(kind, bytes) => {
                let (elements, block_bytes) = kind.stored_block();
                if !in_features.is_multiple_of(elements) {
                    return Err(CpuError::invalid(format!(
                        "rows of {in_features} are no whole blocks of {elements} ({kind:?})"
                    )));
                }
                let expected = outputs * in_features / elements * block_bytes;
                if bytes.len() == expected {
                    return Ok(());
                }
                Err(CpuError::invalid(format!(
                    "a tensor of {kind:?} has {} bytes, not {expected}",
                    bytes.len()
                )))
            }
        }
    }

    /// A block of a row.
    pub(crate) fn block(
        self,
        in_features: usize,
        row: usize,
        index: usize,
    ) -> Result<Block, CpuError> {
        match self {
            BlockSource::Values(source) => {
                let columns = index * BLOCK..((index + 1) * BLOCK).min(in_features);
                Block::of_values(columns.map(|column| source.get(row * in_features + column)))
            }
            BlockSource::Stored(kind, bytes) => {
                let (elements, block_bytes) = kind.stored_block();
                let row_bytes = in_features / elements * block_bytes;
                Ok(kind.block(&bytes[row * row_bytes..][..row_bytes], index))
            }
        }
    }
}

/// Put a column's block into a panel's block.
pub(crate) fn store_block(format: BlockFormat, panel: &mut [u32], column: usize, block: &Block) {
    let code_words = format.code_words();
    for word in 0..code_words {
        let bytes: [u8; 4] = std::array::from_fn(|i| {
            let code = block.codes[4 * word + i];
            if format.nibbles { code | block.codes[BLOCK / 2 + 4 * word + i] << 4 } else { code }
        });
        panel[word * PANEL + column] = u32::from_le_bytes(bytes);
    }
    let halves = &mut panel[code_words * PANEL..];
    set_half(halves, column, block.scale);
    if format.has_offset {
        set_half(halves, PANEL + column, block.offset);
    }
}

fn set_half(words: &mut [u32], index: usize, value: f16) {
    let shift = index % 2 * 16;
    let word = &mut words[index / 2];
    *word = *word & !(0xffff << shift) | u32::from(value.to_bits()) << shift;
}

fn get_half(words: &[u32], index: usize) -> f32 {
    f16::from_bits((words[index / 2] >> (index % 2 * 16)) as u16).to_f32()
}

/// The elements of a column's block, from a panel's block.
pub(crate) fn read_block(format: BlockFormat, panel: &[u32], column: usize) -> [f32; BLOCK] {
    let code_words = format.code_words();
    let halves = &panel[code_words * PANEL..];
    let scale = get_half(halves, column);
    let offset = if format.has_offset { get_half(halves, PANEL + column) } else { 0.0 };
    std::array::from_fn(|index| {
        let (word, shift) =
            if format.nibbles { (index / 4 % 4, index / 16 * 4) } else { (index / 4, 0) };
        let bits = panel[word * PANEL + column] >> (index % 4 * 8 + shift);
        let code = bits & if format.nibbles { 15 } else { 255 };
        element(format, code as i32, scale, offset)
    })
}
