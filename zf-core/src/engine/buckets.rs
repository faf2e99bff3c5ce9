//! Cuts a flat buffer into buckets for collectives.

use std::ops::Range;

/// Element ranges that travel in one collective, one a group member, possibly empty. A bucket is a column range of the
/// `[members, shard]` view of the buffer, so that its size changes neither ownership nor bits.
pub(crate) type Bucket = Vec<Range<usize>>;

/// The buckets of a buffer of which member m has the ranges `pieces[m]`, each of at most about `elements` elements over
/// all members.
pub(crate) fn sharded(pieces: &[Vec<Range<usize>>], elements: usize) -> Vec<Bucket> {
    let chunk = (elements / pieces.len().max(1)).max(1);
    let cut: Vec<Vec<Range<usize>>> =
        pieces.iter().map(|ranges| ranges.iter().flat_map(|range| split(range.clone(), chunk)).collect()).collect();
    let count = cut.iter().map(Vec::len).max().unwrap_or(0);
    (0..count).map(|k| cut.iter().map(|of| of.get(k).cloned().unwrap_or(0..0)).collect()).collect()
}

/// `range` in consecutive pieces of at most `chunk` elements.
pub(crate) fn split(range: Range<usize>, chunk: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(chunk.max(1)).map(move |start| start..end.min(start + chunk.max(1)))
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "members have lists of ranges, some of one")]
mod tests {
    use super::*;

    #[test]
    fn even_shards_are_cut_by_columns() {
        let even = [vec![0..16], vec![16..32]];
        assert_eq!(sharded(&even, 12), vec![vec![0..6, 16..22], vec![6..12, 22..28], vec![12..16, 28..32]]);
        assert_eq!(sharded(&even, 1 << 30), vec![vec![0..16, 16..32]]);
        assert_eq!(sharded(&even, 0).len(), 16);
    }

    #[test]
    fn uneven_owners_leave_empty_pieces() {
        let uneven = [vec![7..10], vec![0..7], vec![]];
        assert_eq!(sharded(&uneven, 12), vec![vec![7..10, 0..4, 0..0], vec![0..0, 4..7, 0..0]]);
    }
}
