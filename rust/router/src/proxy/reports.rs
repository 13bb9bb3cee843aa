//! What workers say about their load, and of the prompts that they had in their cache.

use hyper::HeaderMap;
use memchr::memmem;
use serde::Deserialize;

use crate::core::{Load, Report};

/// The header in which Trunkline's server tells its load with every answer.
const HEADER: &str = "x-trunkline-load";

/// Reads the load header: `running=2, waiting=1, waiting_tokens=300, ...`.
///
/// It counts whole prompts, cached or not, and the router's own requests too; `own` is what the
/// router knows of those. Only what others sent is taken from the header.
pub(super) fn from_header(headers: &HeaderMap, own: &Load) -> Option<Report> {
    let text = headers.get(HEADER)?.to_str().ok()?;
    let value = |wanted: &str| -> Option<u64> {
        let mut fields = text.split(',').filter_map(|field| field.trim().split_once('='));
        fields.find(|(name, _)| *name == wanted)?.1.parse().ok()
    };
    let (waiting, waiting_tokens) = (value("waiting")?, value("waiting_tokens")?);
    let own_waiting = own.in_flight() - own.running();
    let others = waiting.saturating_sub(own_waiting);
    let others_tokens = waiting_tokens.saturating_mul(others).checked_div(waiting).unwrap_or(0);
    let kv_used = match (value("used_tokens"), value("total_tokens")) {
        (Some(used), Some(total)) if total > 0 => used as f64 / total as f64,
        _ => 0.0,
    };
    Some(Report {
        running: value("running")?,
        waiting,
        waiting_uncached_tokens: own.prefill_tokens().saturating_add(others_tokens),
        kv_used,
    })
}

/// The answer of `GET /v1/loads`: one entry per data-parallel rank.
#[derive(Deserialize)]
struct Loads {
    loads: Vec<RankLoad>,
}

#[derive(Deserialize)]
struct RankLoad {
    num_running_reqs: u64,
    num_waiting_reqs: u64,
    #[serde(default)]
    num_waiting_uncached_tokens: u64,
    #[serde(default)]
    token_usage: f64,
    #[serde(default)]
    max_total_num_tokens: usize,
}

/// Reads `/v1/loads`: the report, and how many tokens the cache holds if it is told.
pub(super) fn from_loads(body: &[u8]) -> Option<(Report, Option<usize>)> {
    let loads = serde_json::from_slice::<Loads>(body).ok()?.loads;
    let sum = |field: fn(&RankLoad) -> u64| loads.iter().map(field).fold(0, u64::saturating_add);
    let report = Report {
        running: sum(|rank| rank.num_running_reqs),
        waiting: sum(|rank| rank.num_waiting_reqs),
        waiting_uncached_tokens: sum(|rank| rank.num_waiting_uncached_tokens),
        kv_used: loads.iter().map(|rank| rank.token_usage).sum::<f64>() / loads.len().max(1) as f64,
    };
    let capacity: usize =
        loads.iter().map(|rank| rank.max_total_num_tokens).fold(0, usize::saturating_add);
    Some((report, Some(capacity).filter(|tokens| *tokens > 0)))
}

/// Finds the last `"cached_tokens": N` in the last bytes of a part of an answer.
pub(super) fn cached_tokens(part: &[u8]) -> Option<u64> {
    const NAME: &[u8] = b"\"cached_tokens\"";
    const TAIL: usize = 4_096;
    let tail = &part[part.len().saturating_sub(TAIL)..];
    let after = &tail[memmem::rfind(tail, NAME)? + NAME.len()..];
    let digits: Vec<u8> = after
        .iter()
        .skip_while(|byte| matches!(byte, b':' | b' '))
        .take_while(|byte| byte.is_ascii_digit())
        .copied()
        .collect();
    String::from_utf8(digits).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_tells_what_others_sent() {
        let mut headers = HeaderMap::new();
        assert_eq!(from_header(&headers, &Load::default()), None);
        let text = "running=2, waiting=3, waiting_tokens=300, used_tokens=50, total_tokens=200";
        headers.insert(HEADER, text.parse().expect("a header"));
        let report = Report { running: 2, waiting: 3, waiting_uncached_tokens: 300, kv_used: 0.25 };
        assert_eq!(from_header(&headers, &Load::default()), Some(report));
        headers.insert(HEADER, "running=x, waiting=1".parse().expect("a header"));
        assert_eq!(from_header(&headers, &Load::default()), None);
    }

    #[test]
    fn loads_of_ranks_add_up() {
        let body = br#"{"version": "1", "loads": [
            {"num_running_reqs": 1, "num_waiting_reqs": 2, "num_waiting_uncached_tokens": 30,
             "token_usage": 0.5, "max_total_num_tokens": 1000, "dp_rank": 0},
            {"num_running_reqs": 3, "num_waiting_reqs": 0, "token_usage": 0.1}]}"#;
        let (report, capacity) = from_loads(body).expect("loads");
        assert_eq!((report.running, report.waiting, report.waiting_uncached_tokens), (4, 2, 30));
        assert!((report.kv_used - 0.3).abs() < 1e-9);
        assert_eq!(capacity, Some(1000));
        assert_eq!(from_loads(b"{}"), None);
    }

    #[test]
    fn the_last_count_of_cached_tokens_is_found() {
        assert_eq!(cached_tokens(br#"{"cached_tokens":1} {"cached_tokens" : 42}"#), Some(42));
        assert_eq!(cached_tokens(br#"{"cached_tokens":null}"#), None);
        assert_eq!(cached_tokens(b""), None);
    }
}
