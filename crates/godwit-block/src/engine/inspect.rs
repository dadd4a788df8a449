//! Looks at data that was read.

/// Whether all bytes are zero. Data that is not mostly shows it in its first bytes.
pub(super) fn is_zero(data: &[u8]) -> bool {
    let (blocks, rest) = data.as_chunks::<64>();
    rest.iter().all(|&byte| byte == 0) && blocks.iter().all(is_zero_block)
}

/// Written so that it compiles to a few vector instructions.
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
}
