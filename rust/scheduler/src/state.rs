//! The state that planning and committing work on, and how a sequence moves through it.

use std::collections::VecDeque;
use std::sync::Arc;

use text::Decoder;

use crate::config::Config;
use crate::estimate::{Estimate, Load};
use crate::memory::{Kv, Memory};
use crate::output::Output;
use crate::pace::Pace;
use crate::queue::Queue;
use crate::request::{INTERACTIVE, Request, RequestIndex, Requests, SampleState};
use crate::sequence::{Phase, Sequence, SequenceId, Timing};
use crate::sharing::Sharing;
use crate::slab::Slab;
use crate::slots::Slots;
use crate::stats::Counters;
use crate::step::Step;
use crate::wire::{Address, Events, Finish, Reason, Totals};

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) config: Config,
    pub(crate) decoder: Option<Arc<Decoder>>,
    pub(crate) requests: Requests,
    pub(crate) sequences: Slab<SequenceId, Sequence>,
    pub(crate) queue: Queue,
    pub(crate) sharing: Sharing,
    pub(crate) memory: Memory,
    pub(crate) slots: Slots,
    /// Sequences that compute, in order of admission.
    pub(crate) running: Vec<SequenceId>,
    /// Some in `running` do not run any more: `sweep` is due.
    some_stopped: bool,
    pub(crate) estimate: Estimate,
    pub(crate) pace: Pace,
    pub(crate) events: Events,
    pub(crate) counters: Counters,
    pub(crate) in_flight: VecDeque<Step>,
    /// Requests whose first row is in a plan made since `Scheduler::take_entered`.
    pub(crate) entered: Vec<Address>,
    /// Id of the last step planned.
    pub(crate) last_step: u64,
    /// Sequences held back by their request.
    pub(crate) num_preparing: usize,
    text: String,
}

impl State {
    pub(crate) fn new(config: Config, decoder: Option<Arc<Decoder>>) -> Self {
        Self {
            decoder,
            requests: Requests::new(),
            sequences: Slab::new(),
            queue: Queue::new(&config),
            sharing: Sharing::default(),
            memory: Memory::new(&config),
            slots: Slots::new(config.max_running_requests),
            running: Vec::new(),
            some_stopped: false,
            estimate: Estimate::new(&config),
            pace: Pace::new(&config),
            events: Events::default(),
            counters: Counters::default(),
            in_flight: VecDeque::new(),
            entered: Vec::new(),
            last_step: 0,
            num_preparing: 0,
            text: String::new(),
            config,
        }
    }

    /// Interactive requests of which nothing has run, as far as as many sequences could.
    pub(crate) fn num_impatient(&self) -> u32 {
        let ready = self.queue.len() + self.sharing.num_followers();
        self.requests.num_unstarted(INTERACTIVE).min(ready as u32)
    }

    /// Sequences that wait for anything.
    pub(crate) fn num_waiting(&self) -> usize {
        self.queue.len() + self.sharing.num_followers() + self.num_preparing
    }

    /// Sums over the running sequences.
    pub(crate) fn load(&self) -> Load {
        let mut load = Load::default();
        for &id in &self.running {
            load.add(&self.sequences[id]);
        }
        load
    }

    /// Tells a request's client that it was accepted, once.
    pub(crate) fn accept(&mut self, index: RequestIndex) {
        let request = self.requests.get_mut(index);
        if !std::mem::replace(&mut request.accepted, true) {
            self.events.accepted(request.to);
        }
    }

    /// Brings a request's next pending sample to life. One that has ended already, as a resumed one
    /// may have, is reported, and the next one follows.
    pub(crate) fn activate_next(&mut self, index: RequestIndex) {
        loop {
            let request = self.requests.get(index);
            let pending = request.samples.iter().position(|&state| state == SampleState::Pending);
            let Some(sample) = pending else { return };
            let (id, ended) = self.activate(index, sample);
            let Some(reason) = ended else {
                if !self.requests.get(index).preparing {
                    self.prepared(id);
                }
                return;
            };
            if self.end_sample(id, &Finish::normal(reason)) {
                return;
            }
        }
    }

    /// Makes the sequence of a sample, which is not in the queue yet.
    fn activate(&mut self, index: RequestIndex, sample: usize) -> (SequenceId, Option<Reason>) {
        let request = self.requests.get(index);
        let params = Arc::clone(&request.params);
        let mut output = Output::new(&params, self.decoder.as_ref());
        let mut tokens = Vec::new();
        let mut ended = None;
        if let Some(resume) = request.resume.get(sample)
            && !resume.output_ids.is_empty()
        {
            tokens.extend(&params.prompt);
            tokens.extend(&resume.output_ids);
            ended = output.resume(&params, &resume.output_ids, resume.delivered_chars);
        }
        let sequence = Sequence {
            request: index,
            to: request.to,
            sample: sample as u32,
            namespace: self.memory.namespaces.enter(&params.namespace),
            bounds: params.bounds,
            params,
            phase: Phase::Preparing,
            arrival: request.id,
            since_step: request.since_step,
            tokens,
            computed: 0,
            planned: 0,
            sampled_in_flight: 0,
            in_flight: 0,
            run: 0,
            last_step: 0,
            fill_target: 0,
            leads: false,
            slot: 0,
            must_open: false,
            kv: Kv::empty(),
            output,
            ending: None,
            retract: false,
            timing: Timing { waiting_since: request.submitted, ..Timing::default() },
        };
        let id = self.sequences.insert(sequence);
        self.num_preparing += 1;
        self.requests.get_mut(index).samples[sample] = SampleState::Live(id);
        (id, ended)
    }

    /// Lets a sequence that was held back into the queue.
    pub(crate) fn prepared(&mut self, id: SequenceId) {
        self.num_preparing -= 1;
        self.enqueue(id);
    }

    /// Puts a sequence that waits for nothing else into the queue.
    pub(crate) fn enqueue(&mut self, id: SequenceId) {
        let sequence = &mut self.sequences[id];
        sequence.phase = Phase::Waiting;
        self.queue.push(id, sequence, &self.memory);
    }

    /// Ends a sequence: its last event is written. If it runs, its memory is given back once no step
    /// in flight names it.
    pub(crate) fn finish(&mut self, id: SequenceId, finish: &Finish) {
        let sequence = &self.sequences[id];
        let (index, admitted) = (sequence.request, sequence.timing.admitted);
        let request_ended = self.end_sample(id, finish);
        if !request_ended && !admitted {
            self.activate_next(index);
        }
    }

    /// Ends every sample of a request.
    pub(crate) fn finish_request(&mut self, index: RequestIndex, finish: &Finish) {
        for sample in (0..self.requests.get(index).samples.len()).rev() {
            if self.finish_sample(index, sample, finish) {
                return;
            }
        }
    }

    /// Ends one sample of a request, wherever it is; one that a step in flight names ends at the
    /// commit of that step. Returns whether the request has ended with it.
    pub(crate) fn finish_sample(
        &mut self,
        index: RequestIndex,
        sample: usize,
        finish: &Finish,
    ) -> bool {
        match self.requests.get(index).samples[sample] {
            SampleState::Finished => false,
            SampleState::Live(id) => {
                let sequence = &mut self.sequences[id];
                if sequence.in_flight > 0 {
                    sequence.ending.get_or_insert_with(|| finish.clone());
                    return false;
                }
                let last = self.requests.get(index).unfinished == 1;
                self.finish(id, finish);
                last
            }
            SampleState::Pending => {
                let request = self.requests.get(index);
                let nothing = crate::wire::Output::empty(sample as u32);
                let resumed = request.resume.get(sample).map_or(0, |r| r.output_ids.len());
                let totals = Totals { completion_tokens: resumed as u32, ..Totals::default() };
                self.events.finished(request.to, &nothing, finish, totals);
                self.count_end(&finish.reason);
                self.sample_ended(index, sample)
            }
        }
    }

    /// Writes a sequence's last event and takes it out of wherever it is. Returns whether its request
    /// has ended with it.
    fn end_sample(&mut self, id: SequenceId, finish: &Finish) -> bool {
        let sequence = &mut self.sequences[id];
        let (index, sample) = (sequence.request, sequence.sample);
        let totals = Totals {
            completion_tokens: sequence.num_outputs(),
            num_retractions: sequence.timing.num_retractions,
            queue_time: sequence.timing.queue_time,
        };
        let prompt_len = sequence.bounds.prompt_len as usize;
        let outputs = sequence.tokens.get(prompt_len..).unwrap_or_default();
        sequence.output.deliver(sample, outputs, true, &mut self.text, |output| {
            self.events.finished(sequence.to, output, finish, totals);
        });
        match sequence.phase {
            Phase::Preparing => self.num_preparing -= 1,
            Phase::Waiting => self.queue.remove(id),
            Phase::Following(leader) => self.sharing.unfollow(id, leader),
            Phase::Running | Phase::Draining => {}
        }
        if self.sequences[id].phase == Phase::Running {
            self.stop_running(id);
        } else {
            self.drop_sequence(id);
        }
        self.count_end(&finish.reason);
        self.sample_ended(index, sample as usize)
    }

    fn count_end(&mut self, reason: &Reason) {
        match reason {
            Reason::Abort => self.counters.aborted += 1,
            Reason::Error => self.counters.failed += 1,
            Reason::Length | Reason::StopToken(_) | Reason::StopText(_) => {
                self.counters.finished += 1;
            }
        }
    }

    /// Notes that a sample's last event is out; with the last sample, the request is forgotten.
    fn sample_ended(&mut self, index: RequestIndex, sample: usize) -> bool {
        let request: &mut Request = self.requests.get_mut(index);
        request.samples[sample] = SampleState::Finished;
        request.unfinished -= 1;
        if request.unfinished > 0 {
            return false;
        }
        self.requests.remove(index);
        true
    }

    /// Writes a delta of what a sequence has that its client has not.
    pub(crate) fn deliver(&mut self, id: SequenceId) {
        let sequence = &mut self.sequences[id];
        let outputs = &sequence.tokens[sequence.bounds.prompt_len as usize..];
        let retractions = sequence.timing.num_retractions;
        sequence.output.deliver(sequence.sample, outputs, false, &mut self.text, |output| {
            self.events.delta(sequence.to, output, retractions);
        });
    }

    /// Takes a sequence out of those that run. Call `sweep` before the next plan.
    fn stop_running(&mut self, id: SequenceId) {
        self.some_stopped = true;
        self.stop_leading(id);
        if self.sequences[id].in_flight == 0 {
            self.release(id);
        } else {
            self.sequences[id].phase = Phase::Draining;
        }
    }

    /// Gives back slot and pages of a sequence that no step in flight names, and forgets it.
    pub(crate) fn release(&mut self, id: SequenceId) {
        self.vacate(id);
        self.drop_sequence(id);
    }

    /// Gives back slot and pages; what is computed stays in the cache.
    fn vacate(&mut self, id: SequenceId) {
        let sequence = &mut self.sequences[id];
        let tokens = &sequence.tokens[..sequence.computed as usize];
        self.memory.release(sequence.namespace, &mut sequence.kv, tokens);
        self.slots.give_back(sequence.slot);
    }

    /// Forgets a request that was not accepted yet, without a word.
    pub(crate) fn discard_request(&mut self, index: RequestIndex) {
        let request = self.requests.get(index);
        for sample in request.samples.clone() {
            if let SampleState::Live(id) = sample {
                self.num_preparing -= 1;
                self.drop_sequence(id);
            }
        }
        self.requests.remove(index);
    }

    /// Starts a weight epoch. No step may be in flight.
    pub(crate) fn start_epoch(&mut self, epoch: u64) {
        self.memory.forget_unused();
        self.memory.namespaces.set_epoch(epoch);
        let ids: Vec<_> = self.sequences.iter().map(|(id, _)| id).collect();
        for &id in &ids {
            self.stop_leading(id);
        }
        for id in ids {
            let sequence = &mut self.sequences[id];
            if sequence.phase == Phase::Running {
                continue;
            }
            let waiting = sequence.phase == Phase::Waiting;
            if waiting {
                self.queue.remove(id);
            }
            let namespace = self.memory.namespaces.enter(&sequence.params.namespace);
            self.memory.namespaces.leave(std::mem::replace(&mut sequence.namespace, namespace));
            if waiting {
                self.enqueue(id);
            }
        }
    }

    fn drop_sequence(&mut self, id: SequenceId) {
        let sequence = self.sequences.remove(id);
        self.memory.namespaces.leave(sequence.namespace);
    }

    /// Takes the memory of a running sequence that no step in flight names, and queues it again. It
    /// will continue where it is. Call `sweep` before the next plan.
    pub(crate) fn retract(&mut self, id: SequenceId, now: f64) {
        self.some_stopped = true;
        self.stop_leading(id);
        self.vacate(id);
        let sequence = &mut self.sequences[id];
        self.counters.retracted += 1;
        self.counters.retracted_input_tokens += u64::from(sequence.bounds.prompt_len);
        self.counters.retracted_output_tokens += u64::from(sequence.num_outputs());
        let namespace = self.memory.namespaces.enter(&sequence.params.namespace);
        self.memory.namespaces.leave(std::mem::replace(&mut sequence.namespace, namespace));
        sequence.computed = 0;
        sequence.planned = 0;
        sequence.retract = false;
        sequence.since_step = self.last_step;
        sequence.timing.num_retractions += 1;
        sequence.timing.waiting_since = now;
        self.enqueue(id);
    }

    /// Ends a sequence's lead; its followers look for another leader, or compute.
    pub(crate) fn stop_leading(&mut self, id: SequenceId) {
        if std::mem::take(&mut self.sequences[id].leads) {
            for follower in self.sharing.stop_leading(id, &self.sequences[id]) {
                self.enqueue(follower);
            }
        }
    }

    /// Forgets those that no longer run.
    pub(crate) fn sweep(&mut self) {
        if !std::mem::take(&mut self.some_stopped) {
            return;
        }
        let sequences = &self.sequences;
        self.running
            .retain(|&id| sequences.get(id).is_some_and(|found| found.phase == Phase::Running));
    }
}
