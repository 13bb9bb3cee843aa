//! Events, written straight into one msgpack buffer per client, as `python/engine/messages.py`
//! decodes them.
//!
//! A buffer is one `array 32` of events; its count is filled in when the buffer is taken. Nothing
//! here knows why an event happens.

use rmp::encode as mp;

/// Log-probs of consecutive tokens, with alternatives per token.
#[derive(Clone, Debug, Default)]
pub(crate) struct Logprobs {
    pub(crate) values: Vec<f32>,
    /// The best pairs per token, best first.
    pub(crate) top: PairLists,
    /// Pairs of the requested ids per token.
    pub(crate) ids: PairLists,
}

/// Lists of `(id, log-prob)`, one per token, stored flat.
#[derive(Clone, Debug, Default)]
pub(crate) struct PairLists {
    pairs: Vec<(u32, f32)>,
    ends: Vec<u32>,
}

impl PairLists {
    /// Appends the list of the next token.
    pub(crate) fn push(&mut self, list: impl Iterator<Item = (u32, f32)>) {
        self.pairs.extend(list);
        self.ends.push(self.pairs.len() as u32);
    }

    fn clear(&mut self) {
        self.pairs.clear();
        self.ends.clear();
    }

    fn write(&self, out: &mut Vec<u8>) {
        array(out, self.ends.len());
        let mut start = 0;
        for &end in &self.ends {
            let list = &self.pairs[start..end as usize];
            array(out, list.len());
            for &(id, logprob) in list {
                array(out, 2);
                float32(out, logprob);
                unsigned(out, u64::from(id));
            }
            start = end as usize;
        }
    }
}

impl Logprobs {
    /// Forgets everything, keeping the memory.
    pub(crate) fn clear(&mut self) {
        self.values.clear();
        self.top.clear();
        self.ids.clear();
    }

    fn write(&self, out: &mut Vec<u8>) {
        array(out, 3);
        array(out, self.values.len());
        for &value in &self.values {
            float32(out, value);
        }
        self.top.write(out);
        self.ids.write(out);
    }
}

/// Whom an event is for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address {
    pub(crate) client: i64,
    pub(crate) key: u64,
}

/// New tokens and text of a sample; offsets are absolute.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output<'a> {
    pub(crate) sample: u32,
    pub(crate) token_offset: u32,
    pub(crate) token_ids: &'a [u32],
    pub(crate) text_offset: u64,
    pub(crate) text: &'a str,
    pub(crate) logprobs: Option<&'a Logprobs>,
    pub(crate) prompt_logprobs: Option<&'a Logprobs>,
    /// The bytes of the pooled state; told with the end only.
    pub(crate) pooled_state: Option<&'a [u8]>,
}

impl Output<'_> {
    /// Nothing new.
    pub(crate) fn empty(sample: u32) -> Self {
        Self {
            sample,
            token_offset: 0,
            token_ids: &[],
            text_offset: 0,
            text: "",
            logprobs: None,
            prompt_logprobs: None,
            pooled_state: None,
        }
    }
}

/// What is known when a sample has its first token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Started {
    pub(crate) sample: u32,
    pub(crate) cached_tokens: u32,
    pub(crate) forward_entry_time: f64,
    pub(crate) prefill_finished_time: f64,
    pub(crate) queue_time: f64,
}

/// How a sample ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Finish {
    pub(crate) reason: Reason,
    pub(crate) message: Option<String>,
    pub(crate) status: u16,
}

/// Why a sample ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Reason {
    StopToken(u32),
    /// The stop string, or the pattern, that the text completed.
    StopText(String),
    Length,
    Abort,
    Error,
}

impl Finish {
    pub(crate) fn normal(reason: Reason) -> Self {
        Self { reason, message: None, status: 0 }
    }

    /// An abort on the client's behalf.
    pub(crate) fn abort() -> Self {
        Self { reason: Reason::Abort, message: Some("The request was aborted.".into()), status: 0 }
    }

    pub(crate) fn error(status: u16, message: impl Into<String>) -> Self {
        Self { reason: Reason::Error, message: Some(message.into()), status }
    }
}

/// Totals that go with the last event of a sample.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) completion_tokens: u32,
    pub(crate) num_retractions: u32,
    pub(crate) queue_time: f64,
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Refusal {
    pub(crate) status: u16,
    pub(crate) kind: &'static str,
    pub(crate) message: String,
    pub(crate) param: Option<&'static str>,
}

/// The events of all clients since they were last taken.
#[derive(Debug, Default)]
pub(crate) struct Events {
    buffers: Vec<Buffer>,
}

#[derive(Debug)]
struct Buffer {
    client: i64,
    count: u32,
    bytes: Vec<u8>,
}

/// `array 32` and room for its count.
const HEADER: [u8; 5] = [0xdd, 0, 0, 0, 0];

impl Events {
    /// Takes what was written: one msgpack array per client that has events.
    pub(crate) fn take(&mut self) -> Vec<(i64, Vec<u8>)> {
        // A client that had nothing since the last call is forgotten; it costs little to come back.
        self.buffers.retain(|buffer| buffer.count > 0);
        let taken = self.buffers.iter_mut().map(|buffer| {
            let capacity = buffer.bytes.len();
            let mut bytes = std::mem::replace(&mut buffer.bytes, Vec::with_capacity(capacity));
            bytes[1..5].copy_from_slice(&buffer.count.to_be_bytes());
            buffer.count = 0;
            buffer.bytes.extend(HEADER);
            (buffer.client, bytes)
        });
        taken.collect()
    }

    pub(crate) fn accepted(&mut self, to: Address) {
        self.begin(to, 2, 1);
    }

    pub(crate) fn refused(&mut self, to: Address, refusal: &Refusal) {
        let out = self.begin(to, 6, 2);
        unsigned(out, u64::from(refusal.status));
        string(out, refusal.kind);
        string(out, &refusal.message);
        optional_string(out, refusal.param);
    }

    pub(crate) fn started(&mut self, to: Address, started: &Started) {
        let out = self.begin(to, 8, 3);
        unsigned(out, u64::from(started.sample));
        unsigned(out, u64::from(started.cached_tokens));
        unsigned(out, 0);
        float64(out, started.forward_entry_time);
        float64(out, started.prefill_finished_time);
        float64(out, started.queue_time);
    }

    pub(crate) fn delta(&mut self, to: Address, output: &Output, num_retractions: u32) {
        let out = self.begin(to, 10, 4);
        write_output(out, output);
        unsigned(out, u64::from(num_retractions));
    }

    pub(crate) fn finished(
        &mut self,
        to: Address,
        output: &Output,
        finish: &Finish,
        totals: Totals,
    ) {
        let out = self.begin(to, 17, 5);
        write_output(out, output);
        string(out, finish.reason.name());
        match &finish.reason {
            Reason::StopToken(id) => unsigned(out, u64::from(*id)),
            Reason::StopText(matched) => string(out, matched),
            Reason::Length | Reason::Abort | Reason::Error => nil(out),
        }
        optional_string(out, finish.message.as_deref());
        unsigned(out, u64::from(finish.status));
        unsigned(out, u64::from(totals.completion_tokens));
        unsigned(out, u64::from(totals.num_retractions));
        float64(out, totals.queue_time);
        match output.pooled_state {
            Some(bytes) => mp::write_bin(out, bytes).expect(INFALLIBLE),
            None => nil(out),
        }
    }

    /// Starts an event of `fields` elements: its tag and the client's key are written.
    fn begin(&mut self, to: Address, fields: usize, tag: u64) -> &mut Vec<u8> {
        let found = self.buffers.iter().position(|buffer| buffer.client == to.client);
        let index = found.unwrap_or_else(|| {
            let bytes = HEADER.to_vec();
            self.buffers.push(Buffer { client: to.client, count: 0, bytes });
            self.buffers.len() - 1
        });
        let buffer = &mut self.buffers[index];
        buffer.count += 1;
        array(&mut buffer.bytes, fields);
        unsigned(&mut buffer.bytes, tag);
        unsigned(&mut buffer.bytes, to.key);
        &mut buffer.bytes
    }
}

impl Reason {
    fn name(&self) -> &'static str {
        match self {
            Self::StopToken(_) | Self::StopText(_) => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
        }
    }
}

fn write_output(out: &mut Vec<u8>, output: &Output) {
    unsigned(out, u64::from(output.sample));
    unsigned(out, u64::from(output.token_offset));
    array(out, output.token_ids.len());
    for &id in output.token_ids {
        unsigned(out, u64::from(id));
    }
    unsigned(out, output.text_offset);
    string(out, output.text);
    for logprobs in [output.logprobs, output.prompt_logprobs] {
        match logprobs {
            Some(logprobs) => logprobs.write(out),
            None => nil(out),
        }
    }
}

const INFALLIBLE: &str = "writing to a Vec cannot fail";

fn array(out: &mut Vec<u8>, len: usize) {
    mp::write_array_len(out, len as u32).expect(INFALLIBLE);
}

fn unsigned(out: &mut Vec<u8>, value: u64) {
    mp::write_uint(out, value).expect(INFALLIBLE);
}

fn float32(out: &mut Vec<u8>, value: f32) {
    mp::write_f32(out, value).expect(INFALLIBLE);
}

fn float64(out: &mut Vec<u8>, value: f64) {
    mp::write_f64(out, value).expect(INFALLIBLE);
}

fn string(out: &mut Vec<u8>, value: &str) {
    mp::write_str(out, value).expect(INFALLIBLE);
}

fn optional_string(out: &mut Vec<u8>, value: Option<&str>) {
    match value {
        Some(value) => string(out, value),
        None => nil(out),
    }
}

fn nil(out: &mut Vec<u8>) {
    mp::write_nil(out).expect(INFALLIBLE);
}
