//! The largest logits of a row.

/// The `count` largest of `logits` with their ids, best first, the lower id first among equals.
pub(crate) fn top(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let count = count.min(logits.len());
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
    if count == 0 {
        return best;
    }
    for (id, &logit) in logits.iter().enumerate() {
        if best.len() == count && logit <= best[count - 1].1 {
            continue;
        }
        let at = best.partition_point(|&(_, other)| other >= logit);
        best.insert(at, (id as u32, logit));
        best.truncate(count);
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_come_first_and_the_lower_id_among_equals() {
        let logits = [1.0, 3.0, 3.0, 2.0, 3.0, 0.0];
        assert_eq!(top(&logits, 4), [(1, 3.0), (2, 3.0), (4, 3.0), (3, 2.0)]);
        assert_eq!(top(&logits, 0), []);
        assert_eq!(top(&logits, 9).len(), 6);
    }
}
