//! From a fused projection to queries ready for dot products, and keys and values in the pool.

use std::ops::Range;

use crate::kv::{KvLayout, MAX_HEAD_DIM};
use crate::memory::Rows;
use crate::simd::{Kernel, LANES, Simd, load_prefix};
use crate::weights::{Norm, Rotary};

/// Sizes of one layer's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeadShape {
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
}

/// Some tokens of a step.
pub(crate) struct RotateTask<'a> {
    pub(crate) heads: HeadShape,
    pub(crate) qkv: Rows<f32>,     // [tokens][query | key | value]
    pub(crate) queries: Rows<u32>, // [tokens][heads][padded_dim] elements, scaled
    pub(crate) query_scale: f32,
    pub(crate) rotary: &'a Rotary,
    pub(crate) query_norm: Option<&'a Norm>,
    pub(crate) key_norm: Option<&'a Norm>,
    pub(crate) layout: KvLayout,
    pub(crate) layer: Layer,
    pub(crate) positions: &'a [u32],
    pub(crate) pages: &'a [u32], // of the tokens' positions
    pub(crate) tokens: Range<usize>,
}

/// First word of a layer's keys and values.
#[derive(Clone, Copy)]
pub(crate) struct Layer(pub(crate) *mut u32);

// SAFETY: tasks of one job write disjoint tokens, and none reads meanwhile.
unsafe impl Send for Layer {}
// SAFETY: as above.
unsafe impl Sync for Layer {}

type Head = [f32; MAX_HEAD_DIM];

/// Compute a task.
#[inline(always)]
pub(crate) fn rotate<K: Kernel>(k: K, task: &RotateTask<'_>) {
    let HeadShape { num_heads, num_kv_heads, head_dim } = task.heads;
    let mut head: Head = [0.0; MAX_HEAD_DIM];
    let mut words = [[0; MAX_HEAD_DIM]; 2];
    for token in task.tokens.clone() {
        let row: *const f32 = task.qkv.row(token);
        let queries = task.queries.row(token);
        for index in 0..num_heads {
            // SAFETY: the row holds all heads, and so do the queries.
            unsafe {
                turned_head(
                    k,
                    task,
                    row.add(index * head_dim),
                    token,
                    (&mut head, task.query_norm),
                );
                let to = queries.add(index * task.layout.dim_words);
                store_query(k, &head, task.query_scale, to, task.layout.padded_dim);
            }
        }
        for index in 0..num_kv_heads {
            // SAFETY: the row holds all heads.
            unsafe {
                let key = row.add((num_heads + index) * head_dim);
                turned_head(k, task, key, token, (&mut head, task.key_norm));
                let value = row.add((num_heads + num_kv_heads + index) * head_dim);
                store_kv(k, task, token, (index, &head), (value, &mut words));
            }
        }
    }
}

/// Copy a head, normed and turned.
///
/// # Safety
/// `from` must hold `head_dim` values.
#[inline(always)]
unsafe fn turned_head<K: Kernel>(
    k: K,
    task: &RotateTask<'_>,
    from: *const f32,
    token: usize,
    (head, norm): (&mut Head, Option<&Norm>),
) {
    let head_dim = task.heads.head_dim;
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, head.as_mut_ptr(), head_dim) };
    if let Some(norm) = norm {
        let scale = inverse_rms(k, &head[..head_dim], norm.epsilon);
        for (x, weight) in head[..head_dim].iter_mut().zip(&norm.weight) {
            *x = *x * scale * weight;
        }
    }
    let half = task.rotary.half;
    let at = task.positions[token] as usize * half;
    let (cos, sin) = (&task.rotary.cos[at..at + half], &task.rotary.sin[at..at + half]);
    let (first, second) = head[..2 * half].split_at_mut(half);
    for i in 0..half {
        let (a, b) = (first[i], second[i]);
        first[i] = a * cos[i] - b * sin[i];
        second[i] = b * cos[i] + a * sin[i];
    }
}

#[inline(always)]
fn inverse_rms<K: Kernel>(k: K, head: &[f32], epsilon: f32) -> f32 {
    let s = k.simd();
    let mut sum = s.splat(0.0);
    for chunk in head.chunks(LANES) {
        // SAFETY: the chunk has `len` values.
        let x = unsafe { load_prefix(s, chunk.as_ptr(), chunk.len()) };
        sum = s.fma(x, x, sum);
    }
    1.0 / (s.sum(sum) / head.len() as f32 + epsilon).sqrt()
}

/// # Safety
/// `to` must hold `padded_dim` elements.
#[inline(always)]
unsafe fn store_query<K: Kernel>(k: K, head: &Head, scale: f32, to: *mut u32, padded_dim: usize) {
    let s = k.simd();
    for at in (0..padded_dim).step_by(LANES) {
        // SAFETY: `head` is zero beyond the head's dimensions and as long as the longest.
        unsafe {
            let x = s.mul(s.load(head.as_ptr().add(at)), s.splat(scale));
            k.store_elements(to.add(at / K::PER_WORD), x);
        }
    }
}

/// Write one token's key and value of one head to the pool.
///
/// # Safety
/// `value` must hold `head_dim` values; no other task writes this token or reads the pool.
#[inline(always)]
unsafe fn store_kv<K: Kernel>(
    k: K,
    task: &RotateTask<'_>,
    token: usize,
    (head, key): (usize, &Head),
    (value, [keys, values]): (*const f32, &mut [[u32; MAX_HEAD_DIM]; 2]),
) {
    let layout = task.layout;
    let (page, offset) =
        (task.pages[token] as usize, task.positions[token] as usize % layout.page_size);
    let s = k.simd();
    for at in (0..layout.padded_dim).step_by(LANES) {
        let left = layout.head_dim.saturating_sub(at);
        // SAFETY: both arrays hold the longest head; the value is loaded as a prefix.
        unsafe {
            let word = at / K::PER_WORD;
            k.store_elements(keys.as_mut_ptr().add(word), s.load(key.as_ptr().add(at)));
            let x = load_prefix(s, value.add(at), left.min(LANES));
            k.store_elements(values.as_mut_ptr().add(word), x);
        }
    }
    // SAFETY: the layout keeps every index within the layer; see the contract for other tasks.
    unsafe {
        if !layout.is_grouped() {
            let to = task.layer.0.add(layout.plain_start(page, head, offset));
            std::ptr::copy_nonoverlapping(keys.as_ptr(), to, layout.dim_words);
            let to = to.add(layout.dim_words);
            std::ptr::copy_nonoverlapping(values.as_ptr(), to, layout.dim_words);
            return;
        }
        let group = task.layer.0.add(layout.group_start(page, head, offset));
        let to = [group, group.add(layout.group_words())];
        put_lane::<K>(layout, to, offset % LANES, [keys.as_ptr(), values.as_ptr()]);
    }
}

/// Put one token's elements into its lane of a group.
///
/// # Safety
/// `to` are the keys and values of a group, `from` one token's of `padded_dim` elements.
#[inline(always)]
pub(crate) unsafe fn put_lane<K: Kernel>(
    layout: KvLayout,
    to: [*mut u32; 2],
    lane: usize,
    from: [*const u32; 2],
) {
    // SAFETY: the caller's promise; element indices stay within a group.
    unsafe {
        for word in 0..layout.dim_words {
            *to[0].add(word * LANES + lane) = *from[0].add(word);
        }
        let first = layout.value_element(lane, 0);
        if K::PER_WORD == 1 {
            std::ptr::copy_nonoverlapping(from[1], to[1].add(first), layout.padded_dim);
        } else {
            let (to, from) = (to[1].cast::<u16>().add(first), from[1].cast::<u16>());
            for dim in 0..layout.padded_dim {
                *to.add(2 * dim) = *from.add(dim);
            }
        }
    }
}
