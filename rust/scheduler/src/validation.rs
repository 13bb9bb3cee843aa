//! From a client's `Submit` to the parameters of a request, or a refusal that says why.

use std::sync::Arc;

use text::Stops;

use crate::config::Config;
use crate::messages::{SamplingParams, Submit};
use crate::request::{Bounds, Params, Rank};
use crate::wire::Refusal;

const INVALID: &str = "invalid_request_error";

/// A refusal because of what the request says (HTTP 400).
pub(crate) fn invalid(param: Option<&'static str>, message: impl Into<String>) -> Refusal {
    Refusal { status: 400, kind: INVALID, message: message.into(), param }
}

/// Checks a request against what this engine can do, and derives what its sequences share.
///
/// `max_new_tokens` beyond what the context or the pool can hold after the prompt is clipped to that:
/// the request then ends with `length`.
pub(crate) fn params(
    config: &Config,
    has_tokenizer: bool,
    submit: &mut Submit,
) -> Result<Params, Refusal> {
    check_prompt(config, submit)?;
    check_sampling(config, &submit.sampling)?;
    check_shape(config, submit)?;
    let limit = limit(config, submit)?;
    let stops = stops(has_tokenizer, &mut submit.sampling)?;
    let mut stop_ids = submit.sampling.stop_token_ids.clone();
    // A grammar allows them at its end, and nothing can follow.
    let has_end = submit.grammar.is_some();
    let grammar_end_ids = if has_end { config.eos_token_ids.clone() } else { Vec::new() };
    if !submit.sampling.ignore_eos || has_end {
        stop_ids.extend(&config.eos_token_ids);
    }
    stop_ids.sort_unstable();
    stop_ids.dedup();
    let bounds = Bounds {
        prompt_len: submit.prompt.len() as u32,
        limit,
        min_new_tokens: u32::try_from(submit.sampling.min_new_tokens).unwrap_or(u32::MAX),
        stream_interval: submit.stream_interval,
        stop_mask: stop_ids.iter().fold(0, |mask, id| mask | 1 << (id % 64)),
        logprobs: submit.logprobs.is_some(),
        pooled: submit.pooled,
    };
    let params = Params {
        prompt: std::mem::take(&mut submit.prompt),
        bounds,
        sampling: submit.sampling.clone(),
        stop_ids,
        stops,
        logprobs: submit.logprobs.take(),
        rank: rank(config, submit),
        namespace: std::mem::take(&mut submit.namespace),
        grammar: submit.grammar.is_some(),
        grammar_end_ids,
    };
    check_arena(config, &params)?;
    Ok(params)
}

/// Compiles what ends the text; `None` when nothing does.
fn stops(
    has_tokenizer: bool,
    sampling: &mut SamplingParams,
) -> Result<Option<Arc<Stops>>, Refusal> {
    let strings = std::mem::take(&mut sampling.stop);
    let patterns = std::mem::take(&mut sampling.stop_regex);
    if strings.is_empty() && patterns.is_empty() {
        return Ok(None);
    }
    let param = if patterns.is_empty() { "stop" } else { "stop_regex" };
    if !has_tokenizer {
        let message = format!("{param} needs a tokenizer; this engine has none");
        return Err(invalid(Some(param), message));
    }
    Stops::new(strings, patterns).map(|stops| Some(Arc::new(stops))).map_err(|error| {
        let param = match error {
            text::Error::EmptyStopString { .. } => "stop",
            _ => "stop_regex",
        };
        invalid(Some(param), error.to_string())
    })
}

fn rank(config: &Config, submit: &Submit) -> Rank {
    let priority = match (config.priority_scheduling, config.low_priority_first) {
        (false, _) => 0,
        (true, true) => submit.priority,
        (true, false) => submit.priority.saturating_neg(),
    };
    Rank { class: submit.request_class, priority }
}

fn check_prompt(config: &Config, submit: &Submit) -> Result<(), Refusal> {
    if submit.prompt.is_empty() {
        return Err(invalid(Some("prompt"), "the prompt has no tokens; give at least one"));
    }
    check_ids(config, "prompt", submit.prompt.iter().copied())
}

fn check_ids(
    config: &Config,
    param: &'static str,
    mut ids: impl Iterator<Item = u32>,
) -> Result<(), Refusal> {
    match ids.find(|&id| id >= config.vocab_size) {
        None => Ok(()),
        Some(id) => Err(invalid(
            Some(param),
            format!("{param} has token id {id}; the vocabulary has {} ids", config.vocab_size),
        )),
    }
}

fn check_sampling(config: &Config, sampling: &SamplingParams) -> Result<(), Refusal> {
    check_ids(config, "stop_token_ids", sampling.stop_token_ids.iter().copied())?;
    check_ids(config, "logit_bias", sampling.logit_bias.iter().map(|&(id, _)| id))?;
    let floats = [
        ("temperature", sampling.temperature),
        ("top_p", sampling.top_p),
        ("min_p", sampling.min_p),
        ("frequency_penalty", sampling.frequency_penalty),
        ("presence_penalty", sampling.presence_penalty),
        ("repetition_penalty", sampling.repetition_penalty),
    ];
    let bias = sampling.logit_bias.iter().map(|&(_, value)| ("logit_bias", value));
    match floats.into_iter().chain(bias).find(|(_, value)| !value.is_finite()) {
        None => Ok(()),
        Some((param, value)) => {
            Err(invalid(Some(param), format!("{param} must be a finite number, got {value}")))
        }
    }
}

fn check_shape(config: &Config, submit: &Submit) -> Result<(), Refusal> {
    let (n, max) = (submit.n, config.max_samples);
    if n == 0 || n > u64::from(max) {
        return Err(invalid(Some("n"), format!("n must be in [1, {max}], got {n}")));
    }
    if submit.request_class > 1 {
        let class = submit.request_class;
        return Err(invalid(
            Some("request_class"),
            format!("request_class must be 0 (interactive) or 1 (batch), got {class}"),
        ));
    }
    if !submit.resume.is_empty() && submit.resume.len() as u64 != n {
        return Err(invalid(
            Some("resume"),
            format!("resume has {} entries for n = {n} samples", submit.resume.len()),
        ));
    }
    for resume in &submit.resume {
        check_ids(config, "resume", resume.output_ids.iter().copied())?;
    }
    if submit.pooled && (n != 1 || submit.sampling.max_new_tokens != Some(0)) {
        let message = "the pooled state is that of a prompt: n must be 1 and max_new_tokens 0";
        return Err(invalid(Some("pooled"), message));
    }
    let Some(logprobs) = &submit.logprobs else { return Ok(()) };
    check_ids(config, "logprobs", logprobs.ids.iter().copied())?;
    if logprobs.top_n > config.vocab_size {
        return Err(invalid(
            Some("logprobs"),
            format!(
                "{} top log-probs exceed the vocabulary of {}",
                logprobs.top_n, config.vocab_size
            ),
        ));
    }
    match logprobs.prompt_start {
        Some(start) if start > submit.prompt.len() as u64 => Err(invalid(
            Some("logprobs"),
            format!("prompt_start {start} is beyond the prompt of {} tokens", submit.prompt.len()),
        )),
        _ => Ok(()),
    }
}

/// The number of tokens at which a sequence of the request ends, if its prompt fits at all.
fn limit(config: &Config, submit: &Submit) -> Result<u32, Refusal> {
    let prompt_len = submit.prompt.len() as u64;
    let max_new = submit.sampling.max_new_tokens.unwrap_or(u64::MAX);
    let least = prompt_len + max_new.min(1);
    let context = u64::from(config.max_context_len);
    if least > context {
        let new = least - prompt_len;
        return Err(invalid(
            Some("prompt"),
            format!(
                "The prompt of {prompt_len} tokens, plus {new} new, is longer than the model's \
                 context length of {context} tokens. Shorten the prompt, or raise the engine's \
                 context length."
            ),
        ));
    }
    let pool = config.pool_tokens();
    if prompt_len > pool {
        return Err(invalid(
            Some("prompt"),
            format!(
                "The prompt has {prompt_len} tokens; the engine's KV pool holds {pool} tokens. \
                 Shorten the prompt, or give the engine more KV memory."
            ),
        ));
    }
    // The last token needs no KV.
    let most = context.min(pool + 1);
    Ok(prompt_len.saturating_add(max_new).min(most) as u32)
}

/// Refuses a request whose lists would not leave room for a row in the plan's arena.
fn check_arena(config: &Config, params: &Params) -> Result<(), Refusal> {
    let needed = params.list_bytes();
    let room = config.spare_arena_bytes();
    if needed <= room {
        return Ok(());
    }
    Err(invalid(
        None,
        format!(
            "logit_bias, stop_token_ids and log-prob ids of this request take {needed} bytes of a \
             step's plan; {room} are left for them. Give shorter lists, or raise arena_bytes."
        ),
    ))
}
