//! Zeroes in data.

/// Smallest unit that file systems allocate, in bytes.
pub const BLOCK: usize = 4096;

/// Blocks for each sample of [`is_sparse`].
const SAMPLED: usize = 16;

/// Data is sparse if at least one in so many blocks is all zeroes.
const PART: usize = 4;

/// Returns true if data has enough zero blocks to be sent without them. Data without zero blocks is hardly touched.
pub fn is_sparse(data: &[u8]) -> bool {
    let (blocks, _) = data.as_chunks::<BLOCK>();
    let zero = |block: &&[u8; BLOCK]| is_zero(*block);
    // The last block of each group: the beginning of a larger extent is more often data.
    let mut sample = blocks.iter().skip(SAMPLED - 1).step_by(SAMPLED);
    let sampled = sample.any(|block| is_zero(block));
    let all_looked_at = blocks.len() < SAMPLED;
    (sampled || all_looked_at)
        && blocks.len() > 1
        && blocks.iter().filter(zero).count() * PART >= blocks.len()
}

/// Returns true if data has a block of zeroes.
pub fn has_zero_block(data: &[u8]) -> bool {
    let (blocks, _) = data.as_chunks::<BLOCK>();
    blocks.iter().any(|block| is_zero(block))
}

/// Returns true if all bytes are zero. Most other data differs in its first bytes.
pub fn is_zero(data: &[u8]) -> bool {
    let (blocks, rest) = data.as_chunks::<64>();
    rest.iter().all(|&byte| byte == 0) && blocks.iter().all(is_zero_block)
}

/// Compiles to a few vector instructions.
fn is_zero_block(block: &[u8; 64]) -> bool {
    let (words, _) = block.as_chunks::<8>();
    words
        .iter()
        .fold(0, |any, word| any | u64::from_ne_bytes(*word))
        == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bit_anywhere_is_seen() {
        for length in [0, 1, 63, 64, 65, 512, 4096 + 7] {
            let mut data = vec![0; length];
            assert!(is_zero(&data));
            for at in 0..length {
                data[at] = 0x40;
                assert!(!is_zero(&data), "byte {at} of {length}");
                data[at] = 0;
            }
        }
    }

    #[test]
    fn data_with_few_zeroes_is_not_sparse() {
        let with = |zeroes: usize, all: usize| {
            let block = |at| [u8::from(at < all - zeroes); BLOCK];
            let data: Vec<u8> = (0..all).flat_map(block).collect();
            is_sparse(&data)
        };
        assert!(!with(0, 256));
        assert!(!with(32, 256));
        assert!(with(64, 256));
        assert!(with(255, 256));
        assert!(with(2, 8) && !with(1, 8));
        assert!(!with(0, 8) && !with(1, 1) && !is_sparse(&[0; 512]));
    }
}
