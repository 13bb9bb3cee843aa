//! Linears against float64, and the same bits for any batch, tile and task.

use std::sync::Arc;

use crate::kernels::Kernels;
use crate::kernels::linear::{Epilogue, GatedRows, LinearTask};
use crate::kernels::rows::{Activation, RowChange, RowsTask};
use crate::memory::{Region, Slabs};
use crate::packed_linear::{PANEL, PackedLinear, Storage};
use crate::testing::{Random, bf16, bytes, every_kernel};
use crate::weights::{Element, Source};

fn slabs() -> Arc<Slabs> {
    Arc::new(Slabs::new())
}

struct Case {
    weight: PackedLinear,
    weight_values: Vec<f32>,
    bias: Vec<f32>,
    x_values: Vec<f32>,
    x: Region,
    x_stride: usize,
    num_rows: usize,
}

fn case(kernels: Kernels, k: usize, parts: &[usize], num_rows: usize) -> Case {
    let mut random = Random::new(7);
    let n: usize = parts.iter().sum();
    let round = |x: f32| if kernels.element == Element::Bf16 { bf16(x) } else { x };
    let weight_values: Vec<f32> = (0..n * k).map(|_| round(random.normal())).collect();
    let bias: Vec<f32> = (0..n).map(|_| random.normal()).collect();
    let x_values: Vec<f32> = (0..num_rows * k).map(|_| round(random.normal())).collect();
    let mut weight = PackedLinear::new(&slabs(), (kernels.element, Storage::Dense), k, parts, true);
    let mut start = 0;
    for (part, &width) in parts.iter().enumerate() {
        let rows = &weight_values[start * k..(start + width) * k];
        weight.load_weight(part, Source::new(Element::F32, &bytes(rows))).unwrap();
        weight
            .load_bias(part, Source::new(Element::F32, &bytes(&bias[start..start + width])))
            .unwrap();
        start += width;
    }
    let mut wide = Region::new(num_rows * k);
    for (word, x) in wide.as_mut_slice().iter_mut().zip(&x_values) {
        *word = x.to_bits();
    }
    let x_stride = k.next_multiple_of(16) / kernels.element.per_word();
    let mut x = Region::new(num_rows * x_stride);
    kernels.rows(&RowsTask {
        input: wide.rows(k),
        output: x.rows(x_stride),
        rows: 0..num_rows,
        input_row: None,
        width: k,
        change: RowChange::Round,
    });
    Case { weight, weight_values, bias, x_values, x, x_stride, num_rows }
}

/// Run with rows in groups of `height`; canaries surround the output.
fn run(kernels: Kernels, case: &mut Case, height: usize, add: bool) -> Vec<f32> {
    let n = case.weight.out_features;
    let mut out = Region::new((case.num_rows + 2) * n);
    out.as_mut_slice().fill(1.5_f32.to_bits());
    let panels = case.weight.panels.len();
    let output = crate::testing::inner_rows(&mut out, n, case.num_rows);
    for start in (0..case.num_rows).step_by(height) {
        for panel in (0..panels).step_by(2) {
            kernels.linear(&LinearTask {
                input: case.x.rows(case.x_stride),
                weight: &case.weight,
                epilogue: if add { Epilogue::Add(output) } else { Epilogue::Store(output) },
                panels: panel..(panel + 2).min(panels),
                rows: start..(start + height).min(case.num_rows),
            });
        }
    }
    let all: Vec<f32> = out.as_slice().iter().map(|&bits| f32::from_bits(bits)).collect();
    assert!(all[..n].iter().chain(&all[all.len() - n..]).all(|&x| x == 1.5), "wrote outside");
    all[n..all.len() - n].to_vec()
}

#[test]
fn products_agree_with_float64_in_every_shape() {
    for kernels in every_kernel() {
        for (k, parts) in [(64, vec![64]), (31, vec![5]), (96, vec![70, 64, 3]), (576, vec![128])] {
            let mut case = case(kernels, k, &parts, 13);
            let n = case.weight.out_features;
            for add in [false, true] {
                let out = run(kernels, &mut case, 13, add);
                for row in 0..13 {
                    for column in 0..n {
                        let products = (0..k).map(|i| {
                            f64::from(case.x_values[row * k + i])
                                * f64::from(case.weight_values[column * k + i])
                        });
                        let magnitude: f64 = products.clone().map(f64::abs).sum();
                        let expected: f64 = products.sum::<f64>()
                            + f64::from(case.bias[column])
                            + if add { 1.5 } else { 0.0 };
                        let error = (f64::from(out[row * n + column]) - expected).abs();
                        assert!(error < 1e-6 * (magnitude + 2.0), "{:?} {error}", kernels.isa);
                    }
                }
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_number_of_rows() {
    for kernels in every_kernel() {
        let mut case = case(kernels, 97, &[130, 64], 64);
        let expected = run(kernels, &mut case, 1, false);
        for height in [2, 3, 4, 5, 6, 7, 11, 16, 20, 27, 32, 33, 64] {
            let out = run(kernels, &mut case, height, false);
            let same = out.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{:?} {:?} at {height} rows", kernels.isa, kernels.element);
        }
    }
}

#[test]
fn gated_products_equal_their_parts() {
    let activations = [Activation::Silu, Activation::GeluTanh];
    for (kernels, activation) in
        every_kernel().into_iter().flat_map(|k| activations.map(|a| (k, a)))
    {
        let mut case = case(kernels, 202, &[96, 96], 9);
        assert!(case.weight.halves_are_panels());
        let mut plain = Region::new(9 * 192);
        let values = run(kernels, &mut case, 9, false);
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
            change: RowChange::Gated(activation),
        });
        for height in [1, 2, 9] {
            let mut out = Region::new(9 * stride);
            for start in (0..9).step_by(height) {
                kernels.linear(&LinearTask {
                    input: case.x.rows(case.x_stride),
                    weight: &case.weight,
                    epilogue: Epilogue::Gated(GatedRows { rows: out.rows(stride), activation }),
                    panels: 0..case.weight.panels.len() / 2,
                    rows: start..(start + height).min(9),
                });
            }
            assert_eq!(out.as_slice(), expected.as_slice(), "{:?}", kernels.isa);
        }
    }
}

#[test]
fn parts_start_panels() {
    let linear = PackedLinear::new(&slabs(), (Element::F32, Storage::Dense), 8, &[70, 5], false);
    let starts: Vec<usize> = linear.panels.iter().map(|panel| panel.start).collect();
    assert_eq!(starts, [0, PANEL, 70]);
    assert!(!linear.halves_are_panels());
}
