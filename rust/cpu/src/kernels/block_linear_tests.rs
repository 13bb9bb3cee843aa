//! Linears stored in blocks: the same bits as plain arithmetic, on every instruction set and for any
//! batch, tile and task.

use std::sync::Arc;

use half::f16;

use crate::blocks::{BLOCK, Block, BlockKind, BlockSource};
use crate::kernels::Kernels;
use crate::kernels::linear::{Epilogue, GatedRows, LinearTask};
use crate::kernels::quantise::{
    EIGHT_BIT_ZERO, FOUR_BIT_ZERO, OPERAND_BLOCK_WORDS, QuantiseTask, SCALE, SUM, quantised_words,
};
use crate::kernels::rows::{Activation, RowChange, RowsTask, embed_outputs};
use crate::memory::{Region, Slabs};
use crate::packed_linear::{PackedLinear, Storage};
use crate::simd::bf16_from_f32;
use crate::testing::{Random, bytes, every_kernel, inner_rows};
use crate::weights::{Element, Source};

/// A part's weight: stored blocks of a kind, or values to be quantised.
type PartKind = Option<BlockKind>;

const KINDS: [PartKind; 8] = [
    Some(BlockKind::Q4_0),
    Some(BlockKind::Q4_1),
    Some(BlockKind::Q5_0),
    Some(BlockKind::Q5_1),
    Some(BlockKind::Q8_0),
    Some(BlockKind::Q4K),
    Some(BlockKind::Q5K),
    None,
];

/// Random bytes with scales of a usual size.
fn stored(kind: BlockKind, num_blocks: usize, random: &mut Random) -> Vec<u8> {
    let (_, block_bytes) = kind.stored_block();
    let mut bytes: Vec<u8> =
        (0..num_blocks * block_bytes).map(|_| random.below(256) as u8).collect();
    for block in bytes.chunks_exact_mut(block_bytes) {
        let halves = if block_bytes % 32 == 2 || block_bytes == 22 { 1 } else { 2 };
        for at in 0..halves {
            let scale = f16::from_f32(random.normal() * 0.01);
            block[2 * at..2 * at + 2].copy_from_slice(&scale.to_le_bytes());
        }
    }
    bytes
}

/// A linear, and its blocks by output.
struct Weight {
    linear: PackedLinear,
    blocks: Vec<Vec<Block>>,
    part_of: Vec<PartKind>,
    bias: Vec<f32>,
}

fn weight(element: Element, k: usize, parts: &[(PartKind, usize)]) -> Weight {
    let mut random = Random::new(11);
    let outputs: Vec<usize> = parts.iter().map(|part| part.1).collect();
    let slabs = Arc::new(Slabs::new());
    let mut linear = PackedLinear::new(&slabs, (element, Storage::Blocks), k, &outputs, true);
    let (mut blocks, mut part_of, mut all_bias) = (Vec::new(), Vec::new(), Vec::new());
    for (part, &(kind, outputs)) in parts.iter().enumerate() {
        let values: Vec<f32> = (0..outputs * k).map(|_| random.normal()).collect();
        let values = bytes(&values);
        let raw = kind.map(|kind| stored(kind, outputs * k / kind.stored_block().0, &mut random));
        let source = if let (Some(raw), Some(kind)) = (&raw, kind) {
            linear.load_blocks(part, kind, raw).unwrap();
            BlockSource::Stored(kind, raw)
        } else {
            let source = Source::new(Element::F32, &values);
            linear.load_weight(part, source).unwrap();
            BlockSource::Values(source)
        };
        for row in 0..outputs {
            let of_row = (0..k.div_ceil(BLOCK)).map(|index| source.block(k, row, index).unwrap());
            blocks.push(of_row.collect());
            part_of.push(kind);
        }
        let bias: Vec<f32> = (0..outputs).map(|_| random.normal()).collect();
        linear.load_bias(part, Source::new(Element::F32, &bytes(&bias))).unwrap();
        all_bias.extend(bias);
    }
    Weight { linear, blocks, part_of, bias: all_bias }
}

/// Rounded values as operands, with rows' tails that must not count.
fn operands(kernels: Kernels, values: &[f32], k: usize) -> Region {
    let stride = k.next_multiple_of(16) / kernels.element.per_word();
    let num_rows = values.len() / k;
    let mut x = Region::new(num_rows * stride);
    x.as_mut_slice().fill(0x3f80_3f80);
    for (index, &value) in values.iter().enumerate() {
        let word =
            &mut x.as_mut_slice()[index / k * stride + index % k / kernels.element.per_word()];
        let bits = u32::from(bf16_from_f32(value));
        *word = match (kernels.element, index % k % 2) {
            (Element::F32, _) => value.to_bits(),
            (Element::Bf16, 0) => *word & 0xffff_0000 | bits,
            (Element::Bf16, _) => *word & 0xffff | bits << 16,
        };
    }
    x
}

fn quantised(kernels: Kernels, values: &[f32], k: usize) -> Region {
    let mut x = operands(kernels, values, k);
    let num_rows = values.len() / k;
    let mut output = Region::new(num_rows * quantised_words(k));
    kernels.quantise(&QuantiseTask {
        input: x.rows(k.next_multiple_of(16) / kernels.element.per_word()),
        output: output.rows(quantised_words(k)),
        rows: 0..num_rows,
        width: k,
    });
    output
}

/// Values that bfloat16 has, so that both element types compute the same.
fn values(count: usize) -> Vec<f32> {
    let mut random = Random::new(5);
    (0..count).map(|_| crate::testing::bf16(random.normal())).collect()
}

fn run(kernels: Kernels, weight: &Weight, x: &mut Region, height: usize, add: bool) -> Vec<f32> {
    let (k, n) = (weight.linear.in_features, weight.linear.out_features);
    let num_rows = x.len() / quantised_words(k);
    let mut out = Region::new((num_rows + 2) * n);
    out.as_mut_slice().fill(1.5_f32.to_bits());
    let output = inner_rows(&mut out, n, num_rows);
    let panels = weight.linear.panels.len();
    for start in (0..num_rows).step_by(height) {
        for panel in (0..panels).step_by(2) {
            kernels.linear(&LinearTask {
                input: x.rows(quantised_words(k)),
                weight: &weight.linear,
                epilogue: if add { Epilogue::Add(output) } else { Epilogue::Store(output) },
                panels: panel..(panel + 2).min(panels),
                rows: start..(start + height).min(num_rows),
            });
        }
    }
    let all: Vec<f32> = out.as_slice().iter().map(|&bits| f32::from_bits(bits)).collect();
    assert!(all[..n].iter().chain(&all[all.len() - n..]).all(|&x| x == 1.5), "wrote outside");
    all[n..all.len() - n].to_vec()
}

/// The product as the arithmetic is documented: exact integers, then one rounding per block.
fn expected(weight: &Weight, row: &[u32], output: usize) -> f32 {
    let mut sum = 0.0_f32;
    let format = weight.part_of[output].map_or(crate::blocks::BlockFormat::INT8, BlockKind::format);
    for (block, x) in weight.blocks[output].iter().zip(row.chunks_exact(OPERAND_BLOCK_WORDS)) {
        let codes: Vec<i32> = x[..SCALE]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .map(|b| i32::from(b as i8))
            .collect();
        let products = codes.iter().zip(&block.codes);
        let exact: i32 = products.map(|(x, &q)| x * (i32::from(q) - format.zero())).sum();
        let scale = f32::from_bits(x[SCALE]);
        sum = (exact as f32).mul_add(scale * block.scale.to_f32(), sum);
        if format.has_offset {
            sum = (scale * codes.iter().sum::<i32>() as f32).mul_add(block.offset.to_f32(), sum);
        }
    }
    sum + weight.bias[output]
}

fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

#[test]
fn products_have_the_bits_of_plain_arithmetic() {
    for kind in KINDS {
        for (k, outputs) in [(512, 70), (256, 64), (768, 5)] {
            let x = values(7 * k);
            for kernels in every_kernel() {
                let weight = weight(kernels.element, k, &[(kind, outputs)]);
                let mut x = quantised(kernels, &x, k);
                let out = run(kernels, &weight, &mut x, 7, false);
                let words = x.as_slice().chunks_exact(quantised_words(k));
                let expected: Vec<f32> = words
                    .flat_map(|row| (0..outputs).map(|output| expected(&weight, row, output)))
                    .collect();
                assert!(same(&out, &expected), "{:?} {kind:?} {k} x {outputs}", kernels.isa);
                let added: Vec<f32> = expected.iter().map(|x| 1.5 + x).collect();
                assert!(same(&run(kernels, &weight, &mut x, 7, true), &added), "{kind:?}");
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_number_of_rows() {
    // Parts of several formats, and one whose rows are no whole blocks.
    let mixed = [(KINDS[1], 130), (KINDS[4], 64), (KINDS[0], 64), (KINDS[0], 64)];
    for (k, parts) in [(96, &mixed[..]), (45, &[(None, 200)])] {
        let x = values(64 * k);
        for kernels in every_kernel() {
            let weight = weight(kernels.element, k, parts);
            let mut x = quantised(kernels, &x, k);
            let expected = run(kernels, &weight, &mut x, 1, false);
            for height in [2, 3, 4, 5, 6, 7, 11, 16, 33, 64] {
                let out = run(kernels, &weight, &mut x, height, false);
                assert!(same(&out, &expected), "{:?} at {height} rows", kernels.isa);
            }
        }
    }
}

#[test]
fn gated_products_equal_their_parts() {
    for parts in [[(KINDS[4], 96), (KINDS[4], 96)], [(KINDS[0], 96), (KINDS[3], 96)]] {
        let x = values(9 * 64);
        for kernels in every_kernel() {
            let weight = weight(kernels.element, 64, &parts);
            let mut x = quantised(kernels, &x, 64);
            let mut plain = Region::new(9 * 192);
            let values = run(kernels, &weight, &mut x, 9, false);
            for (word, x) in plain.as_mut_slice().iter_mut().zip(&values) {
                *word = x.to_bits();
            }
            let stride = 96 / kernels.element.per_word();
            let mut expected = Region::new(9 * stride);
            kernels.rows(&RowsTask {
                input: plain.rows(192),
                output: expected.rows(stride),
                rows: 0..9,
                input_row: None,
                width: 96,
                change: RowChange::Gated(Activation::GeluTanh),
            });
            for height in [1, 2, 9] {
                let mut out = Region::new(9 * stride);
                for start in (0..9).step_by(height) {
                    kernels.linear(&LinearTask {
                        input: x.rows(quantised_words(64)),
                        weight: &weight.linear,
                        epilogue: Epilogue::Gated(GatedRows {
                            rows: out.rows(stride),
                            activation: Activation::GeluTanh,
                        }),
                        panels: 0..weight.linear.panels.len() / 2,
                        rows: start..(start + height).min(9),
                    });
                }
                assert_eq!(out.as_slice(), expected.as_slice(), "{:?}", kernels.isa);
            }
        }
    }
}

#[test]
fn quantised_rows_are_near_and_have_the_same_bits_everywhere() {
    for k in [32, 45, 50, 96] {
        let mut x = values(3 * k);
        x[0] = 1000.0; // an outlier spoils its own block only
        x[k..2 * k].fill(0.0);
        let mut first: Option<Vec<u32>> = None;
        for kernels in every_kernel() {
            let rows = quantised(kernels, &x, k);
            let known = first.get_or_insert_with(|| rows.as_slice().to_vec());
            assert_eq!(rows.as_slice(), known, "{:?} {:?}", kernels.isa, kernels.element);
        }
        let words = first.expect("one kernel at least");
        for (row, words) in words.chunks_exact(quantised_words(k)).enumerate() {
            for (block, words) in words.chunks_exact(OPERAND_BLOCK_WORDS).enumerate() {
                let scale = f32::from_bits(words[SCALE]);
                let codes: Vec<i32> = words[..SCALE]
                    .iter()
                    .flat_map(|word| word.to_le_bytes())
                    .map(|byte| i32::from(byte as i8))
                    .collect();
                for (offset, &code) in codes.iter().enumerate() {
                    let column = block * BLOCK + offset;
                    let value = if column < k { x[row * k + column] } else { 0.0 };
                    assert!(
                        (value - scale * code as f32).abs() <= scale * 0.5001,
                        "{value} {code}"
                    );
                }
                let sum: i32 = codes.iter().sum();
                assert_eq!(words[EIGHT_BIT_ZERO] as i32, -128 * sum);
                assert_eq!(words[FOUR_BIT_ZERO] as i32, -8 * sum);
                assert_eq!(words[SUM], (scale * sum as f32).to_bits());
            }
        }
    }
}

#[test]
fn what_is_not_finite_stays_so() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0, 17, 40] {
            let mut x = values(2 * 64);
            x[at] = bad;
            for kernels in every_kernel() {
                let weight = weight(kernels.element, 64, &[(KINDS[4], 64)]);
                let mut x = quantised(kernels, &x, 64);
                let out = run(kernels, &weight, &mut x, 2, false);
                assert!(out[..64].iter().all(|x| !x.is_finite()), "{:?}", kernels.isa);
                assert!(out[64..].iter().all(|x| x.is_finite()), "{:?}", kernels.isa);
            }
        }
    }
}

#[test]
fn tiny_rows_become_zeros() {
    let x = [1e-38_f32; 32];
    for kernels in every_kernel() {
        let rows = quantised(kernels, &x, 32);
        assert_eq!(rows.as_slice()[..SCALE], [0; SCALE], "{:?}", kernels.isa);
    }
}

#[test]
fn outputs_are_read_back_as_they_were_stored() {
    let mixed = [(KINDS[1], 130), (KINDS[4], 64), (KINDS[6], 70), (KINDS[5], 3)];
    for (k, parts) in [(256, &mixed[..]), (45, &[(None, 70)])] {
        let weight = weight(Element::Bf16, k, parts);
        let outputs = weight.linear.out_features;
        let tokens: Vec<u32> = (0..outputs as u32).collect();
        let mut out = Region::new((outputs + 2) * k);
        embed_outputs(&weight.linear, &tokens, 1.0, inner_rows(&mut out, k, outputs));
        for (output, row) in out.as_floats()[k..(outputs + 1) * k].chunks_exact(k).enumerate() {
            let kind = weight.part_of[output];
            let format = kind.map_or(crate::blocks::BlockFormat::INT8, BlockKind::format);
            for (column, &value) in row.iter().enumerate() {
                let expected = weight.blocks[output][column / BLOCK].value(format, column % BLOCK);
                assert_eq!(value.to_bits(), expected.to_bits(), "{kind:?} {output} {column}");
            }
        }
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let form = (Element::Bf16, Storage::Blocks);
    let mut linear = PackedLinear::new(&Arc::new(Slabs::new()), form, 64, &[2], false);
    assert!(!linear.is_loaded());
    assert!(linear.load_blocks(0, BlockKind::Q8_0, &[0; 3 * 34]).is_err());
    assert!(linear.load_blocks(0, BlockKind::Q4K, &[0; 144]).is_err());
    let huge = bytes(&[1e8; 128]);
    let error = linear.load_weight(0, Source::new(Element::F32, &huge)).unwrap_err();
    assert!(error.to_string().contains("without quantization"), "{error}");
    assert!(linear.load_blocks(0, BlockKind::Q8_0, &[0; 4 * 34]).is_ok());
    assert!(linear.is_loaded());
    assert!(BlockKind::named("Q6_K").is_err());
}
