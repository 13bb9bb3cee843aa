//! One function per kernel, instruction set and element type: where generic code meets
//! `#[target_feature]`.

use super::attention::{AttendContext, AttendItem, MergeItem, Scratch};
use super::linear::LinearTask;
use super::quantise::QuantiseTask;
use super::rotate::RotateTask;
use super::rows::{EmbedTask, FiniteTask, RowsTask};
use super::scan::{Extent, NoiseTask};
use crate::isa::Isa;
use crate::simd::{Portable, PortableBf16};
use crate::weights::Element;

/// The kernels of one instruction set and element type.
///
/// The pointers are unsafe to call because the processor must have the instructions; `Kernels::new`
/// has checked that, and the methods are safe.
#[derive(Clone, Copy)]
pub(crate) struct Kernels {
    pub(crate) isa: Isa,
    pub(crate) element: Element,
    linear: unsafe fn(&LinearTask<'_>),
    quantise: unsafe fn(&QuantiseTask),
    rows: unsafe fn(&RowsTask<'_>),
    embed: unsafe fn(&EmbedTask<'_>),
    finite: unsafe fn(&mut FiniteTask<'_>),
    checksum: unsafe fn(&[u32]) -> f32,
    rotate: unsafe fn(&RotateTask<'_>),
    attend: AttendFunction,
    merge: MergeFunction,
    extent: unsafe fn(&[f32], usize) -> Extent,
    exp_sum: unsafe fn(&[f32], f32) -> f32,
    soft_cap: unsafe fn(&mut [f32], f32),
    scale: unsafe fn(&mut [f32], f32, f32),
    sum_of_exp: unsafe fn(&[f32]) -> f64,
    noisy_best: unsafe fn(&NoiseTask<'_>) -> u32,
    visit_above: VisitFunction,
    exp_each: unsafe fn(&[f32], &mut Vec<f64>),
}

type VisitFunction = unsafe fn(&[f32], f32, &mut dyn FnMut(u32, f32));
type AttendFunction = unsafe fn(&AttendContext<'_>, &AttendItem, &mut Scratch);
type MergeFunction = unsafe fn(&AttendContext<'_>, &MergeItem, &mut Scratch);

macro_rules! table {
    ($name:ident, $isa:expr, $element:expr, $kernel:ty $(, $feature:literal)?) => {
        mod $name {
            use super::*;

            #[inline(always)]
            fn kernel() -> $kernel {
                // SAFETY: `Kernels::new` hands a table out only after `Isa::is_available`.
                unsafe { <$kernel>::assume() }
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn linear(task: &LinearTask<'_>) {
                crate::kernels::linear::linear(kernel(), task);
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn quantise(task: &QuantiseTask) {
                crate::kernels::quantise::quantise(kernel(), task);
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn rows(task: &RowsTask<'_>) {
                crate::kernels::rows::rows(kernel(), task);
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn embed(task: &EmbedTask<'_>) {
                crate::kernels::rows::embed(kernel(), task);
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn finite(task: &mut FiniteTask<'_>) {
                crate::kernels::rows::finite(kernel(), task);
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn checksum(words: &[u32]) -> f32 {
                crate::kernels::rows::checksum(kernel(), words)
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn rotate(task: &RotateTask<'_>) {
                crate::kernels::rotate::rotate(kernel(), task);
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn attend(context: &AttendContext<'_>, item: &AttendItem, scratch: &mut Scratch) {
                crate::kernels::attention::attend(kernel(), context, item, scratch);
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn merge(context: &AttendContext<'_>, item: &MergeItem, scratch: &mut Scratch) {
                crate::kernels::attention::merge_partials(kernel(), context, item, scratch);
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn extent(row: &[f32], first: usize) -> Extent {
                crate::kernels::scan::extent(kernel(), row, first)
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn exp_sum(row: &[f32], highest: f32) -> f32 {
                crate::kernels::scan::exp_sum(kernel(), row, highest)
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn soft_cap(row: &mut [f32], cap: f32) {
                crate::kernels::scan::soft_cap(kernel(), row, cap);
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn scale(row: &mut [f32], highest: f32, temperature: f32) {
                crate::kernels::scan::scale(row, highest, temperature);
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn sum_of_exp(row: &[f32]) -> f64 {
                crate::kernels::scan::sum_of_exp(row)
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn noisy_best(task: &NoiseTask<'_>) -> u32 {
                crate::kernels::scan::noisy_best(kernel(), task)
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn visit_above(row: &[f32], lowest: f32, visit: &mut dyn FnMut(u32, f32)) {
                crate::kernels::scan::visit_above(kernel(), row, lowest, visit);
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn exp_each(row: &[f32], results: &mut Vec<f64>) {
                crate::kernels::scan::exp_each(row, results);
            }
            pub(super) const TABLE: Kernels = Kernels {
                isa: $isa,
                element: $element,
                linear,
                quantise,
                rows,
                embed,
                finite,
                checksum,
                rotate,
                attend,
                merge,
                extent,
                exp_sum,
                soft_cap,
                scale,
                sum_of_exp,
                noisy_best,
                visit_above,
                exp_each,
            };
        }
    };
}

table!(portable_f32, Isa::Portable, Element::F32, Portable);
table!(portable_bf16, Isa::Portable, Element::Bf16, PortableBf16);

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{
        AttendContext, AttendItem, Element, EmbedTask, Extent, FiniteTask, Isa, Kernels,
        LinearTask, MergeItem, NoiseTask, QuantiseTask, RotateTask, RowsTask, Scratch,
    };
    use crate::simd::{Avx2, Avx2Bf16, Avx512, Avx512Bf16};

    table!(avx2_f32, Isa::Avx2, Element::F32, Avx2, "avx2,fma,f16c");
    table!(avx2_bf16, Isa::Avx2, Element::Bf16, Avx2Bf16, "avx2,fma,f16c");
    table!(
        avx512_f32,
        Isa::Avx512Bf16,
        Element::F32,
        Avx512,
        "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni"
    );
    table!(
        avx512_bf16,
        Isa::Avx512Bf16,
        Element::Bf16,
        Avx512Bf16,
        "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni"
    );

    pub(super) fn table(isa: Isa, element: Element) -> Option<Kernels> {
        match (isa, element) {
            (Isa::Avx512Bf16, Element::F32) => Some(avx512_f32::TABLE),
            (Isa::Avx512Bf16, Element::Bf16) => Some(avx512_bf16::TABLE),
            (Isa::Avx2, Element::F32) => Some(avx2_f32::TABLE),
            (Isa::Avx2, Element::Bf16) => Some(avx2_bf16::TABLE),
            (Isa::Portable, _) => None,
        }
    }
}

impl Kernels {
    /// The kernels of an instruction set.
    ///
    /// # Panics
    /// If the processor does not have it.
    pub(crate) fn new(isa: Isa, element: Element) -> Kernels {
        assert!(isa.is_available(), "this processor does not have {isa}");
        #[cfg(target_arch = "x86_64")]
        if let Some(table) = x86::table(isa, element) {
            return table;
        }
        match element {
            Element::F32 => portable_f32::TABLE,
            Element::Bf16 => portable_bf16::TABLE,
        }
    }

    pub(crate) fn linear(self, task: &LinearTask<'_>) {
        // SAFETY: `new` has checked the instructions.
        unsafe { (self.linear)(task) };
    }

    pub(crate) fn quantise(self, task: &QuantiseTask) {
        // SAFETY: `new` has checked the instructions.
        unsafe { (self.quantise)(task) };
    }

    pub(crate) fn rows(self, task: &RowsTask<'_>) {
        // SAFETY: `new` has checked the instructions.
        unsafe { (self.rows)(task) };
    }

    pub(crate) fn embed(self, task: &EmbedTask<'_>) {
        // SAFETY: `new` has checked the instructions.
        unsafe { (self.embed)(task) };
    }

    pub(crate) fn finite(self, task: &mut FiniteTask<'_>) {
        // SAFETY: `new` has checked the instructions.
        unsafe { (self.finite)(task) };
    }

    pub(crate) fn checksum(self, words: &[u32]) -> f32 {
        // SAFETY: `new` has checked the instructions.
        unsafe { (self.checksum)(words) }
    }

    pub(crate) fn rotate(self, task: &RotateTask<'_>) {
        // SAFETY: `new` has checked the instructions.
        unsafe { (self.rotate)(task) };
    }

    pub(crate) fn attend(
        self,
        context: &AttendContext<'_>,
        item: &AttendItem,
        scratch: &mut Scratch,
    ) {
        // SAFETY: `new` has checked the instructions.
        unsafe { (self.attend)(context, item, scratch) };
    }

    pub(crate) fn merge_partials(
        self,
        context: &AttendContext<'_>,
        item: &MergeItem,
        scratch: &mut Scratch,
    ) {
        // SAFETY: `new` has checked the instructions.
        unsafe { (self.merge)(context, item, scratch) };
    }

    pub(crate) fn extent(self, row: &[f32], first: usize) -> Extent {
        // SAFETY: `new` has checked the instructions.
        unsafe { (self.extent)(row, first) }
    }

    pub(crate) fn exp_sum(self, row: &[f32], highest: f32) -> f32 {
        // SAFETY: `new` has checked the instructions.
        unsafe { (self.exp_sum)(row, highest) }
    }

    pub(crate) fn soft_cap(self, row: &mut [f32], cap: f32) {
        // SAFETY: `new` has checked the instructions.
        unsafe { (self.soft_cap)(row, cap) };
    }

    pub(crate) fn scale(self, row: &mut [f32], highest: f32, temperature: f32) {
        // SAFETY: `new` has checked the instructions.
        unsafe { (self.scale)(row, highest, temperature) };
    }

    pub(crate) fn sum_of_exp(self, row: &[f32]) -> f64 {
        // SAFETY: `new` has checked the instructions.
        unsafe { (self.sum_of_exp)(row) }
    }

    pub(crate) fn noisy_best(self, task: &NoiseTask<'_>) -> u32 {
        // SAFETY: `new` has checked the instructions.
        unsafe { (self.noisy_best)(task) }
    }

    pub(crate) fn visit_above(self, row: &[f32], lowest: f32, visit: &mut dyn FnMut(u32, f32)) {
        // SAFETY: `new` has checked the instructions.
        unsafe { (self.visit_above)(row, lowest, visit) };
    }

    pub(crate) fn exp_each(self, row: &[f32], results: &mut Vec<f64>) {
        // SAFETY: `new` has checked the instructions.
        unsafe { (self.exp_each)(row, results) };
    }
}
