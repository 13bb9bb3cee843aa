//! `Submit` as Python writes it, and events as Python reads them.

use std::io::Cursor;

use rmp::decode as mp;
use serde::Serialize;

#[derive(Clone, Debug, Serialize)]
pub struct Sampling {
    pub temperature: f64,
    pub top_p: f64,
    pub top_k: u32,
    pub min_p: f64,
    pub frequency_penalty: f64,
    pub presence_penalty: f64,
    pub repetition_penalty: f64,
    pub max_new_tokens: Option<u32>,
    pub min_new_tokens: u32,
    pub stop: Vec<String>,
    pub stop_token_ids: Vec<u32>,
    pub ignore_eos: bool,
    pub skip_special_tokens: bool,
    pub no_stop_trim: bool,
    pub seed: u64,
    pub logit_bias: Vec<(u32, f64)>,
    pub stop_regex: Vec<String>,
}

#[derive(Clone, Debug, Serialize)]
pub struct LogprobRequest(pub Option<u32>, pub u32, pub Vec<u32>, pub bool);

#[derive(Clone, Debug, Serialize)]
pub struct Resume(pub Vec<u32>, pub u64);

#[derive(Clone, Debug, Serialize)]
pub struct Submit {
    pub key: u64,
    pub rid: String,
    pub prompt: Vec<u32>,
    pub sampling: Sampling,
    pub n: u32,
    pub stream_interval: u32,
    pub priority: i64,
    pub namespace: String,
    pub request_class: u8,
    pub logprobs: Option<LogprobRequest>,
    pub pooled: bool,
    pub resume: Vec<Resume>,
    pub must_prepare: bool,
    pub grammar: Option<(&'static str, &'static str, Vec<u32>)>,
}

/// A greedy request of one sample that only its length ends.
pub fn submit(key: u64, prompt: &[u32], max_new_tokens: u32) -> Submit {
    Submit {
        key,
        rid: format!("r{key}"),
        prompt: prompt.to_vec(),
        sampling: Sampling {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
            max_new_tokens: Some(max_new_tokens),
            min_new_tokens: 0,
            stop: vec![],
            stop_token_ids: vec![],
            ignore_eos: false,
            skip_special_tokens: true,
            no_stop_trim: false,
            seed: key,
            logit_bias: vec![],
            stop_regex: vec![],
        },
        n: 1,
        stream_interval: 1,
        priority: 0,
        namespace: String::new(),
        request_class: 0,
        logprobs: None,
        pooled: false,
        resume: vec![],
        must_prepare: false,
        grammar: None,
    }
}

impl Submit {
    pub fn encode(&self) -> Vec<u8> {
        rmp_serde::to_vec(self).unwrap()
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logprobs {
    pub values: Vec<f64>,
    pub top: Vec<Vec<(f64, u32)>>,
    pub ids: Vec<Vec<(f64, u32)>>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    pub token_offset: usize,
    pub token_ids: Vec<u32>,
    pub text_offset: usize,
    pub text: String,
    pub logprobs: Option<Logprobs>,
    pub prompt_logprobs: Option<Logprobs>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Matched {
    No,
    Token(u32),
    Text(String),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    pub reason: String,
    pub matched: Matched,
    pub message: Option<String>,
    pub status: u16,
    pub completion_tokens: u32,
    pub num_retractions: u32,
    pub queue_time: f64,
    pub pooled_state: Option<Vec<u8>>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Started {
    pub sample: usize,
    pub cached_device: u32,
    pub forward_entry_time: f64,
    pub prefill_finished_time: f64,
    pub queue_time: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Accepted { key: u64 },
    Refused { key: u64, status: u16, kind: String, message: String, param: Option<String> },
    Started { key: u64, started: Started },
    Delta { key: u64, sample: usize, output: Output, num_retractions: u32 },
    Finished { key: u64, sample: usize, output: Output, finished: Finished },
}

struct Reader<'a>(Cursor<&'a [u8]>);

impl Reader<'_> {
    fn array(&mut self) -> usize {
        mp::read_array_len(&mut self.0).unwrap() as usize
    }

    fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..self.array()).map(|_| item(self)).collect()
    }

    fn int<T: TryFrom<u64>>(&mut self) -> T {
        let value: u64 = mp::read_int(&mut self.0).unwrap();
        T::try_from(value).ok().expect("the value fits its type")
    }

    fn f64(&mut self) -> f64 {
        match self.peek() {
            0xca => f64::from(mp::read_f32(&mut self.0).unwrap()),
            _ => mp::read_f64(&mut self.0).unwrap(),
        }
    }

    fn peek(&self) -> u8 {
        self.0.get_ref()[self.0.position() as usize]
    }

    fn string(&mut self) -> String {
        let len = mp::read_str_len(&mut self.0).unwrap() as usize;
        let start = self.0.position() as usize;
        self.0.set_position((start + len) as u64);
        String::from_utf8(self.0.get_ref()[start..start + len].to_vec()).unwrap()
    }

    fn bytes(&mut self) -> Vec<u8> {
        let len = mp::read_bin_len(&mut self.0).unwrap() as usize;
        let start = self.0.position() as usize;
        self.0.set_position((start + len) as u64);
        self.0.get_ref()[start..start + len].to_vec()
    }

    fn optional<T>(&mut self, item: impl FnOnce(&mut Self) -> T) -> Option<T> {
        if self.peek() == 0xc0 {
            mp::read_nil(&mut self.0).unwrap();
            None
        } else {
            Some(item(self))
        }
    }

    fn logprobs(&mut self) -> Logprobs {
        assert_eq!(self.array(), 3);
        let pairs = |reader: &mut Self| {
            reader.list(|reader| {
                reader.list(|reader| {
                    assert_eq!(reader.array(), 2);
                    (reader.f64(), reader.int())
                })
            })
        };
        Logprobs { values: self.list(Self::f64), top: pairs(self), ids: pairs(self) }
    }

    fn output(&mut self) -> Output {
        Output {
            token_offset: self.int(),
            token_ids: self.list(Self::int),
            text_offset: self.int(),
            text: self.string(),
            logprobs: self.optional(Self::logprobs),
            prompt_logprobs: self.optional(Self::logprobs),
        }
    }

    fn matched(&mut self) -> Matched {
        match self.peek() {
            0xc0 => {
                mp::read_nil(&mut self.0).unwrap();
                Matched::No
            }
            0xa0..=0xbf | 0xd9..=0xdb => Matched::Text(self.string()),
            _ => Matched::Token(self.int()),
        }
    }

    fn event(&mut self) -> Event {
        let fields = self.array();
        let tag: u8 = self.int();
        let key = self.int();
        let (expected, event) = match tag {
            1 => (2, Event::Accepted { key }),
            2 => {
                let (status, kind, message) = (self.int(), self.string(), self.string());
                let param = self.optional(Self::string);
                (6, Event::Refused { key, status, kind, message, param })
            }
            3 => {
                let (sample, cached_device) = (self.int(), self.int());
                assert_eq!(self.int::<u64>(), 0, "nothing is cached on the host");
                let started = Started {
                    sample,
                    cached_device,
                    forward_entry_time: self.f64(),
                    prefill_finished_time: self.f64(),
                    queue_time: self.f64(),
                };
                (8, Event::Started { key, started })
            }
            4 => {
                let (sample, output) = (self.int(), self.output());
                (10, Event::Delta { key, sample, output, num_retractions: self.int() })
            }
            5 => {
                let (sample, output) = (self.int(), self.output());
                let finished = Finished {
                    reason: self.string(),
                    matched: self.matched(),
                    message: self.optional(Self::string),
                    status: self.int(),
                    completion_tokens: self.int(),
                    num_retractions: self.int(),
                    queue_time: self.f64(),
                    pooled_state: self.optional(Self::bytes),
                };
                (17, Event::Finished { key, sample, output, finished })
            }
            _ => panic!("unknown event tag {tag}"),
        };
        assert_eq!(fields, expected, "fields of event {tag}");
        event
    }
}

/// Decodes what `take_events` gives for one client.
pub fn decode(bytes: &[u8]) -> Vec<Event> {
    let mut reader = Reader(Cursor::new(bytes));
    let events = reader.list(Reader::event);
    assert_eq!(reader.0.position() as usize, bytes.len(), "bytes follow the events");
    events
}
