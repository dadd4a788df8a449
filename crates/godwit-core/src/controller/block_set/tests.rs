use super::*;

fn extent(start: u64, sectors: u32) -> Extent {
    Extent::new(Lba(start), sectors).unwrap()
}

#[test]
fn runs_are_whole_blocks_and_end_at_the_limit_or_the_disk() {
    let mut dirty = BlockSet::new(Sectors(1001), 8);
    dirty.set(extent(9, 1));
    dirty.set(extent(15, 34));
    dirty.set(extent(1000, 1));
    assert_eq!(dirty.count(), 7);
    assert_eq!(dirty.next_run(Lba(0), 1024), Some(extent(8, 48)));
    assert_eq!(dirty.next_run(Lba(0), 16), Some(extent(8, 16)));
    assert_eq!(dirty.next_run(Lba(24), 16), Some(extent(24, 16)));
    assert_eq!(dirty.next_run(Lba(56), 64), Some(extent(1000, 1)));
    dirty.clear(extent(8, 48));
    assert_eq!(dirty.count(), 1);
    assert_eq!(dirty.next_run(Lba(0), 64), Some(extent(1000, 1)));
    assert_eq!(dirty.next_run(Lba(1001), 64), None);
    assert_eq!(dirty.sectors(), 8);
    assert_eq!(
        dirty.bytes(),
        512,
        "of the last block the disk has a sector"
    );
    dirty.clear_covered(extent(1000, 1));
    assert_eq!(dirty.count(), 0, "the disk's end cuts the last block short");
    dirty.set(extent(0, 24));
    dirty.clear_covered(extent(1, 22));
    assert_eq!(dirty.count(), 2, "what is covered in part stays");
}

/// Compares the bitmap with a plain vector of blocks.
#[test]
fn groups_of_one_kind_are_like_blocks_of_one_kind() {
    const BLOCKS: u64 = 5 * GROUP_BLOCKS + 77;
    let capacity = Sectors(BLOCKS * 8 - 3);
    let mut map = BlockSet::new(capacity, 8);
    let mut plain = vec![false; BLOCKS as usize];
    let mut state = 11_u64;
    let mut next = |most: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) % most
    };
    for round in 0..600 {
        let longest = [9, 700, 3 * GROUP_BLOCKS][next(3) as usize];
        let first = next(BLOCKS);
        let end = (first + 1 + next(longest)).min(BLOCKS);
        let (first, end) = match next(4) {
            // Whole groups.
            0 => (first / GROUP_BLOCKS * GROUP_BLOCKS, BLOCKS),
            _ => (first, end),
        };
        let sets = next(2) == 0;
        let sectors = (Lba(first * 8), Lba(end * 8));
        match sets {
            true => map.set_range(sectors.0, sectors.1),
            false => map.clear_range(sectors.0, sectors.1),
        }
        plain[first as usize..end as usize].fill(sets);
        assert_eq!(map.count(), plain.iter().filter(|set| **set).count() as u64);
        let from = next(BLOCKS);
        let found = (from..BLOCKS).find(|block| plain[*block as usize]);
        let expected = found.map(|found| {
            let clear = (found..BLOCKS).find(|block| !plain[*block as usize]);
            let end = clear.unwrap_or(BLOCKS) * 8;
            (Lba(found * 8), Lba(end.min(capacity.0)))
        });
        assert_eq!(
            map.next_blocks(Lba(from * 8), u64::MAX),
            expected,
            "{round}"
        );
        if round % 50 == 0 {
            let words: Vec<u64> = map.words().collect();
            let again = BlockSet::from_words(capacity, 8, &words);
            assert_eq!(again.count(), map.count());
            assert!(again.words().eq(words));
            assert_eq!(map.count_common(&again), map.count());
        }
    }
    map.fill();
    assert_eq!(map.count(), BLOCKS);
    map.empty();
    assert_eq!(map.next_blocks(Lba(0), 8), None);
}

#[test]
fn what_is_alike_costs_nothing_by_its_size() {
    // 8 TiB.
    let capacity = Sectors(8 << 31);
    let begun = std::time::Instant::now();
    let mut map = BlockSet::new(capacity, 8);
    map.fill();
    map.clear_range(Lba(1 << 20), Lba(capacity.0 - (1 << 20)));
    let run = map.next_blocks(Lba(1 << 20), u64::MAX);
    assert_eq!(run, Some((Lba(capacity.0 - (1 << 20)), Lba(capacity.0))));
    assert_eq!(map.sectors(), 2 << 20);
    let took = begun.elapsed();
    assert!(took.as_secs() < 1, "{took:?}");
}

#[test]
fn sets_of_any_blocks_are_added_and_removed() {
    let mut small = BlockSet::new(Sectors(1001), 8);
    small.set(extent(9, 1));
    small.set(extent(1000, 1));
    let mut large = BlockSet::new(Sectors(1001), 64);
    large.add(&small);
    let ranges: Vec<_> = large.ranges(Lba(0)).collect();
    assert_eq!(ranges, [(Lba(0), Lba(64)), (Lba(960), Lba(1001))]);
    large.add(&small);
    assert_eq!(large.count(), 2);
    let runs: Vec<_> = large.runs(Lba(64), 64).collect();
    assert_eq!(runs, [extent(960, 41)]);
    small.fill();
    small.remove(&large);
    let runs: Vec<_> = small.runs(Lba(0), 512).collect();
    assert_eq!(runs, [extent(64, 512), extent(576, 384)]);
}
