//! A prompt as a chain of block hashes.

use xxhash_rust::xxh3::xxh3_64;

const CHAIN_FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;

/// How a prompt's bytes are cut: blocks of `bytes`, each worth `tokens`.
///
/// Token ids of 32 bits have `bytes = 4 * tokens`; for text, `tokens` is an estimate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockShape {
    /// Bytes of a block, at least 1.
    pub bytes: usize,
    /// Tokens that a block stands for, at least 1.
    pub tokens: u32,
}

/// What the router knows of a prompt: its length, and one hash for every prefix of whole blocks.
///
/// Two prompts of one namespace have equal hashes exactly as far as they are equal (up to 64-bit
/// collisions, which only cost a detour).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    hashes: Vec<u64>,
    num_tokens: u64,
    block_tokens: u32,
}

impl Prompt {
    /// Cuts `bytes` into blocks; the rest that fills no block belongs to no prefix.
    ///
    /// `namespace` separates what never shares a cache (model, adapter, salt).
    pub fn new(bytes: &[u8], num_tokens: u64, shape: BlockShape, namespace: &[u8]) -> Self {
        let mut hash = xxh3_64(namespace);
        let hashes = bytes
            .chunks_exact(shape.bytes.max(1))
            .map(|block| {
                hash = chain(hash, xxh3_64(block));
                hash
            })
            .collect();
        Self { hashes, num_tokens, block_tokens: shape.tokens.max(1) }
    }

    /// A prompt whose blocks already have names, as in traces: equal names mean equal blocks.
    pub fn from_block_names(names: &[u64], num_tokens: u64, block_tokens: u32) -> Self {
        let mut hash = 0;
        let hashes = names
            .iter()
            .map(|name| {
                hash = chain(hash, xxh3_64(&name.to_le_bytes()));
                hash
            })
            .collect();
        Self { hashes, num_tokens, block_tokens: block_tokens.max(1) }
    }

    /// A prompt of which only the length is known: nothing is shared.
    pub fn of_length(num_tokens: u64) -> Self {
        Self { hashes: Vec::new(), num_tokens, block_tokens: 1 }
    }

    /// The hash of each prefix of 1, 2, ... blocks.
    pub fn hashes(&self) -> &[u64] {
        &self.hashes
    }

    /// Tokens of the whole prompt.
    pub fn num_tokens(&self) -> u64 {
        self.num_tokens
    }

    /// Tokens of the first `blocks` blocks, at most the prompt's.
    pub fn tokens_of(&self, blocks: u32) -> u64 {
        (u64::from(blocks) * u64::from(self.block_tokens)).min(self.num_tokens)
    }
}

/// The blocks' own hashes do not depend on each other, so that they overlap in the pipeline; only
/// this multiplication is serial.
fn chain(previous: u64, block: u64) -> u64 {
    let product = u128::from(previous ^ block) * u128::from(CHAIN_FACTOR);
    (product as u64 ^ (product >> 64) as u64).wrapping_add(block.rotate_left(29))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: BlockShape = BlockShape { bytes: 4, tokens: 2 };

    #[test]
    fn hashes_are_equal_as_far_as_the_prompts_are() {
        let one = Prompt::new(b"aaaabbbbccccdd", 7, SHAPE, b"m");
        let two = Prompt::new(b"aaaabbbbxxxxdddd", 8, SHAPE, b"m");
        assert_eq!(one.hashes().len(), 3);
        assert_eq!(one.hashes()[..2], two.hashes()[..2]);
        assert_ne!(one.hashes()[2], two.hashes()[2]);
    }

    #[test]
    fn the_order_of_blocks_and_the_namespace_count() {
        let one = Prompt::new(b"aaaabbbb", 4, SHAPE, b"m");
        let swapped = Prompt::new(b"bbbbaaaa", 4, SHAPE, b"m");
        let other = Prompt::new(b"aaaabbbb", 4, SHAPE, b"n");
        assert_ne!(one.hashes()[1], swapped.hashes()[1]);
        assert_ne!(one.hashes()[0], other.hashes()[0]);
    }

    #[test]
    fn tokens_of_blocks_end_with_the_prompt() {
        let prompt = Prompt::new(b"aaaabbbb", 3, SHAPE, b"");
        assert_eq!((prompt.tokens_of(1), prompt.tokens_of(2)), (2, 3));
    }
}
