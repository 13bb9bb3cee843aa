//! Comparing runs of key ids.

/// Key ids compared at once while looking for the first difference: small enough to end near it,
/// large enough for SIMD.
const BLOCK: usize = 32;

/// Length of the longest common prefix of two runs.
pub(crate) fn common_prefix(left: &[u32], right: &[u32]) -> usize {
    let length = left.len().min(right.len());
    let (left, right) = (&left[..length], &right[..length]);
    let mut equal = 0;
    for (left_block, right_block) in left.chunks_exact(BLOCK).zip(right.chunks_exact(BLOCK)) {
        if left_block != right_block {
            break;
        }
        equal += BLOCK;
    }
    equal + left[equal..].iter().zip(&right[equal..]).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::common_prefix;

    #[test]
    fn finds_the_first_difference_at_every_position() {
        let left: Vec<u32> = (0..100).collect();
        assert_eq!(common_prefix(&left, &left), 100);
        for position in 0..100 {
            let mut right = left.clone();
            right[position] = 1000;
            assert_eq!(common_prefix(&left, &right), position);
            assert_eq!(common_prefix(&left, &left[..position]), position);
            assert_eq!(common_prefix(&left[..position], &left), position);
        }
    }
}
