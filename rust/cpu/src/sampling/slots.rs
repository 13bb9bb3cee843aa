//! Per-slot sampling state: opened and closed by the plan, read at every draw.

use rustc_hash::FxHashMap;

use crate::error::CpuError;
use crate::plan::{Plan, list};

/// Everything about one sequence that its draws depend on, besides its logits.
#[derive(Clone, Debug, Default)]
pub(crate) struct SlotSampling {
    pub(crate) temperature: f32,
    pub(crate) top_p: f32,
    pub(crate) min_p: f32,
    pub(crate) frequency_penalty: f32,
    pub(crate) presence_penalty: f32,
    pub(crate) repetition_penalty: f32,
    pub(crate) top_k: i32,
    pub(crate) prompt_len: i32,
    pub(crate) min_new_tokens: i32,
    pub(crate) has_grammar: bool,
    /// Its log-probs are those of the distribution that it draws from.
    pub(crate) processed: bool,
    pub(crate) seed: u64,
    pub(crate) bias: Vec<(u32, f32)>,
    pub(crate) suppressed: Vec<u32>,
    /// Output ids with their number; empty without penalties.
    pub(crate) counts: FxHashMap<u32, u32>,
}

impl SlotSampling {
    fn opened(plan: &Plan<'_>, index: usize) -> SlotSampling {
        let floats: Vec<f32> = plan.opened_float()[8 * index..][..8]
            .iter()
            .map(|&bits| f32::from_bits(bits))
            .collect();
        let ints = &plan.opened_int()[8 * index..][..8];
        let seed = &plan.opened_seed()[2 * index..][..2];
        let bias_values = list(plan.bias_offsets(), plan.bias_values(), index);
        let bias = list(plan.bias_offsets(), plan.bias_ids(), index)
            .iter()
            .zip(bias_values)
            .map(|(&id, &bits)| (id, f32::from_bits(bits)))
            .collect();
        let mut slot = SlotSampling {
            temperature: floats[0],
            top_p: floats[1],
            min_p: floats[2],
            frequency_penalty: floats[3],
            presence_penalty: floats[4],
            repetition_penalty: floats[5],
            top_k: ints[0] as i32,
            prompt_len: ints[1] as i32,
            min_new_tokens: ints[2] as i32,
            has_grammar: ints[4] & 1 != 0,
            processed: ints[4] & 2 != 0,
            seed: u64::from(seed[0]) | u64::from(seed[1]) << 32,
            bias,
            suppressed: list(plan.suppressed_offsets(), plan.suppressed_ids(), index).to_vec(),
            counts: FxHashMap::default(),
        };
        for &id in list(plan.output_offsets(), plan.output_ids(), index) {
            slot.count(id);
        }
        slot
    }

    fn is_penalised(&self) -> bool {
        self.frequency_penalty != 0.0
            || self.presence_penalty != 0.0
            || self.repetition_penalty != 1.0
    }

    /// Note an output id.
    pub(crate) fn count(&mut self, id: u32) {
        if self.is_penalised() {
            *self.counts.entry(id).or_insert(0) += 1;
        }
    }

    /// Whether a token at this position comes before `min_new_tokens` are out.
    pub(crate) fn suppresses(&self, position: u32) -> bool {
        position as i32 - self.prompt_len < self.min_new_tokens
    }
}

/// The slots' states.
#[derive(Default)]
pub(crate) struct SlotStates {
    slots: FxHashMap<u32, SlotSampling>,
}

impl SlotStates {
    /// Check that the plan's ids lie in the vocabulary.
    pub(crate) fn check(plan: &Plan<'_>, vocab_size: usize) -> Result<(), CpuError> {
        let lists = [
            ("bias_ids", plan.bias_ids()),
            ("suppressed_ids", plan.suppressed_ids()),
            ("output_ids", plan.output_ids()),
            ("score_ids", plan.score_ids()),
        ];
        for (name, ids) in lists {
            if let Some(&id) = ids.iter().find(|&&id| id as usize >= vocab_size) {
                return Err(CpuError::invalid(format!(
                    "{name} of the plan holds id {}, the vocabulary has {vocab_size}; requests are \
                     to be refused before",
                    id as i32
                )));
            }
        }
        Ok(())
    }

    /// Close and open slots as the plan says.
    pub(crate) fn update(&mut self, plan: &Plan<'_>) {
        for slot in plan.closed_slots() {
            self.slots.remove(slot);
        }
        for (index, &slot) in plan.opened_slots().iter().enumerate() {
            self.slots.insert(slot, SlotSampling::opened(plan, index));
        }
    }

    /// The state of a slot, if it is open.
    pub(crate) fn get(&self, slot: u32) -> Option<&SlotSampling> {
        self.slots.get(&slot)
    }

    /// Note a token that was just drawn.
    pub(crate) fn count(&mut self, slot: u32, id: u32) {
        if let Some(state) = self.slots.get_mut(&slot) {
            state.count(id);
        }
    }
}
