//! A client: applies events once, by their offsets, and remembers how everything ended.

use std::collections::BTreeMap;

use super::messages::{Event, Finished, Logprobs, Output, Started, Submit};

/// What a client has of one sample.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    pub token_ids: Vec<u32>,
    pub text: String,
    pub num_deltas: usize,
    pub num_retractions: u32,
    pub started: Option<Started>,
    pub finished: Option<Finished>,
    pub logprobs: Logprobs,
    pub prompt_logprobs: Option<Logprobs>,
}

/// What a client has of one request.
#[derive(Clone, Debug)]
pub struct Sent {
    pub submit: Submit,
    pub accepted: bool,
    pub refused: Option<(u16, String)>,
    pub samples: Vec<Sample>,
}

impl Sent {
    pub fn is_over(&self) -> bool {
        let ended =
            !self.samples.is_empty() && self.samples.iter().all(|sample| sample.finished.is_some());
        self.refused.is_some() || ended
    }
}

#[derive(Clone, Debug, Default)]
pub struct Client {
    pub requests: BTreeMap<u64, Sent>,
}

impl Client {
    pub fn sent(&mut self, submit: &Submit) {
        let samples = (0..submit.n as usize).map(|k| {
            let resume = submit.resume.get(k);
            Sample {
                token_ids: resume.map_or(vec![], |resume| resume.0.clone()),
                text: resume.map_or(String::new(), |resume| {
                    super::text_of(&resume.0).chars().take(resume.1 as usize).collect()
                }),
                ..Sample::default()
            }
        });
        let sent = Sent {
            submit: submit.clone(),
            accepted: false,
            refused: None,
            samples: samples.collect(),
        };
        self.requests.insert(submit.key, sent);
    }

    pub fn apply(&mut self, event: Event) {
        match event {
            Event::Accepted { key } => {
                let sent = self.live(key);
                assert!(!sent.accepted, "accepted twice");
                sent.accepted = true;
            }
            Event::Refused { key, status, message, .. } => {
                let sent = self.live(key);
                assert!(!sent.accepted, "refused after it was accepted");
                sent.refused = Some((status, message));
            }
            Event::Started { key, started } => {
                let sample = self.running(key, started.sample);
                assert!(sample.started.is_none(), "started twice");
                sample.started = Some(started);
            }
            Event::Delta { key, sample, output, num_retractions } => {
                let sample = self.running(key, sample);
                assert!(sample.started.is_some(), "a delta before the start");
                assert!(!output.token_ids.is_empty(), "a delta that says nothing");
                assert!(num_retractions >= sample.num_retractions, "retractions only add up");
                sample.num_deltas += 1;
                sample.num_retractions = num_retractions;
                append(sample, output);
            }
            Event::Finished { key, sample, output, finished } => {
                let sample = self.running(key, sample);
                assert!(finished.num_retractions >= sample.num_retractions, "and stay");
                append(sample, output);
                sample.finished = Some(finished);
            }
        }
    }

    fn live(&mut self, key: u64) -> &mut Sent {
        let sent = self.requests.get_mut(&key).expect("an event of a request that was sent");
        assert!(!sent.is_over(), "an event after the last one");
        sent
    }

    fn running(&mut self, key: u64, sample: usize) -> &mut Sample {
        let sent = self.live(key);
        assert!(sent.accepted, "an event before it was accepted");
        let sample = &mut sent.samples[sample];
        assert!(sample.finished.is_none(), "an event after the last one");
        sample
    }
}

fn append(sample: &mut Sample, output: Output) {
    if !output.token_ids.is_empty() {
        assert_eq!(output.token_offset, sample.token_ids.len(), "token offset");
    }
    if !output.text.is_empty() {
        assert_eq!(output.text_offset, sample.text.chars().count(), "text offset");
    }
    sample.token_ids.extend(&output.token_ids);
    sample.text += &output.text;
    if let Some(logprobs) = output.logprobs {
        assert_eq!(logprobs.values.len(), output.token_ids.len(), "a log-prob per token");
        sample.logprobs.values.extend(logprobs.values);
        sample.logprobs.top.extend(logprobs.top);
        sample.logprobs.ids.extend(logprobs.ids);
    }
    if output.prompt_logprobs.is_some() {
        assert!(sample.prompt_logprobs.is_none(), "prompt log-probs twice");
        sample.prompt_logprobs = output.prompt_logprobs;
    }
}
