//! Cuts a flat buffer into buckets for collectives.

use std::ops::Range;

use crate::layout::Placement;

/// Element ranges that travel in one collective, one a group member, possibly empty. A bucket is a column range of the
/// `[members, shard]` view of the buffer, so that its size changes neither ownership nor bits.
pub(crate) type Bucket = Vec<Range<usize>>;

/// The buckets of a buffer owned as `placement` says, each of at most about `elements` elements over all members.
pub(crate) fn sharded(placement: &Placement, elements: usize) -> Vec<Bucket> {
    let chunk = (elements / placement.group()).max(1);
    let pieces: Vec<Vec<Range<usize>>> = (0..placement.group())
        .map(|member| placement.ranges(member).flat_map(|range| split(range, chunk)).collect())
        .collect();
    let count = pieces.iter().map(Vec::len).max().unwrap_or(0);
    (0..count).map(|k| pieces.iter().map(|of| of.get(k).cloned().unwrap_or(0..0)).collect()).collect()
}

/// `range` in consecutive pieces of at most `chunk` elements.
pub(crate) fn split(range: Range<usize>, chunk: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(chunk.max(1)).map(move |start| start..end.min(start + chunk.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Owner;

    #[test]
    fn even_shards_are_cut_by_columns() {
        let placement = Placement::even(32, 2).expect("2 divides 32");
        assert_eq!(sharded(&placement, 12), vec![vec![0..6, 16..22], vec![6..12, 22..28], vec![12..16, 28..32]]);
        assert_eq!(sharded(&placement, 1 << 30), vec![vec![0..16, 16..32]]);
        assert_eq!(sharded(&placement, 0).len(), 16);
    }

    #[test]
    fn uneven_owners_leave_empty_pieces() {
        let owner = |start, end, member| Owner { start, end, member };
        let placement = Placement::custom(10, 3, vec![owner(0, 7, 1), owner(7, 10, 0)]).expect("covers 10");
        assert_eq!(sharded(&placement, 12), vec![vec![7..10, 0..4, 0..0], vec![0..0, 4..7, 0..0]]);
    }
}
