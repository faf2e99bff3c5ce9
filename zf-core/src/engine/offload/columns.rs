//! The order in which a rank's part of a flat buffer is kept where columns matter: one column after the other.
//!
//! A rank owns ranges of a flat buffer, whose elements lie row by row. A column of `[out, in]` is strided there. Its state moves
//! between tiers as a whole and has a count of updates of its own, so that masters, moments and gradients that leave the device
//! are kept in *column order*: the owned elements of column 0 from top to bottom, then those of column 1, and so on. In that
//! order a column is one range.

use std::ops::Range;

use crate::layout::Slot;
use crate::stage::Axis;

/// The column order of one flat buffer on one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Columns {
    pub(crate) blocks: Vec<Block>,
    pub(crate) len: usize,
}

/// An owned part of one parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Block {
    /// Index of the parameter in the flat buffer.
    pub(crate) slot: usize,
    /// Elements of the flat buffer.
    pub(crate) range: Range<usize>,
    /// Position of the first element in column order.
    pub(crate) first: usize,
    shape: Shape,
    /// Elements of the parameter before `range`.
    before: usize,
}

/// How the columns of a parameter lie in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// It has none; the whole is taken as one.
    Whole,
    /// Each is `len` elements in a row.
    Contiguous { len: usize },
    /// Column c are the elements c, c + `count`, ...
    Strided { count: usize },
}

impl Shape {
    /// The columns of a parameter along `axis`; a parameter without an input dimension has none. `fold` takes further
    /// dimensions into the input.
    pub(crate) fn of(slot: &Slot, axis: Axis, fold: bool) -> Self {
        let dims = &slot.shape;
        let input = match dims.len() {
            2 => slot.input_dim.unwrap_or(1),
            3.. if fold => 1,
            _ => return Self::Whole,
        };
        let size = |dim: i64| usize::try_from(dim).unwrap_or(0);
        let (rows, row) = (size(dims[0]), dims[1..].iter().map(|&dim| size(dim)).product());
        if rows * row == 0 {
            return Self::Whole;
        }
        let dim = if axis == Axis::Input { input } else { 1 - input };
        if dim == 0 { Self::Contiguous { len: row } } else { Self::Strided { count: row } }
    }

    /// How many columns a parameter of `numel` elements has.
    pub(crate) fn count(self, numel: usize) -> usize {
        match self {
            Self::Whole => 1,
            Self::Contiguous { len } => numel / len,
            Self::Strided { count } => count,
        }
    }

    /// The column of an element of the parameter.
    pub(crate) fn column_of(self, element: usize) -> usize {
        match self {
            Self::Whole => 0,
            Self::Contiguous { len } => element / len,
            Self::Strided { count } => element % count,
        }
    }

    /// Whether it can be chosen from.
    pub(crate) fn has_columns(self) -> bool {
        self != Self::Whole
    }
}

impl Columns {
    /// The order for the parts `segments` (slot, elements of the flat buffer) of parameters `slots` with the given shapes.
    pub(crate) fn new(slots: &[Slot], shapes: &[Shape], segments: impl Iterator<Item = (usize, Range<usize>)>) -> Self {
        let (mut blocks, mut len) = (Vec::new(), 0);
        for (slot, range) in segments {
            let before = range.start - slots[slot].offset;
            let size = range.len();
            blocks.push(Block { slot, range, first: len, shape: shapes[slot], before });
            len += size;
        }
        Self { blocks, len }
    }

    /// The ranges, in column order, of the columns of each slot that `wanted` names, merged where they touch.
    pub(crate) fn ranges(&self, wanted: impl Fn(usize, usize) -> bool) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for block in &self.blocks {
            for column in block.columns().filter(|&column| wanted(block.slot, column)) {
                push(&mut ranges, block.column(column));
            }
        }
        ranges
    }

    /// Cuts ranges where blocks end: index of the block, and range.
    pub(crate) fn by_block<'a>(
        &'a self,
        ranges: &'a [Range<usize>],
    ) -> impl Iterator<Item = (usize, Range<usize>)> + 'a {
        ranges.iter().flat_map(move |range| {
            let (mut at, end) = (range.start, range.end);
            std::iter::from_fn(move || {
                if at >= end {
                    return None;
                }
                let index = self.blocks.partition_point(|block| block.first + block.range.len() <= at);
                let block = self.blocks.get(index)?;
                let part = at..end.min(block.first + block.range.len());
                at = part.end;
                Some((index, part))
            })
        })
    }
}

/// Appends a range, joined to the last one where they touch; empty ones are left out.
pub(crate) fn push(ranges: &mut Vec<Range<usize>>, range: Range<usize>) {
    match ranges.last_mut() {
        _ if range.is_empty() => {}
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

/// Elements of all ranges.
pub(crate) fn total(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(ExactSizeIterator::len).sum()
}

impl Block {
    /// The columns of which this block may hold elements.
    pub(crate) fn columns(&self) -> Range<usize> {
        let (a, b) = (self.before, self.before + self.range.len());
        match self.shape {
            Shape::Whole => 0..1,
            Shape::Contiguous { len } => a / len..b.div_ceil(len),
            Shape::Strided { count } => 0..count,
        }
    }

    /// The elements of a column in column order; perhaps none.
    pub(crate) fn column(&self, column: usize) -> Range<usize> {
        let (a, b) = (self.before, self.before + self.range.len());
        let (start, end) = match self.shape {
            Shape::Whole => (0, self.range.len()),
            Shape::Contiguous { len } => ((column * len).clamp(a, b) - a, ((column + 1) * len).clamp(a, b) - a),
            Shape::Strided { count } => (self.start(column, count), self.start(column + 1, count)),
        };
        self.first + start..self.first + end
    }

    /// Elements of the columns before `column`, of `count` strided ones: each has one for every full row between the first and
    /// the last, and one more or less at the ends.
    fn start(&self, column: usize, count: usize) -> usize {
        let (a, b) = (self.before, self.before + self.range.len());
        column * (b / count) + column.min(b % count) - column * (a / count) - column.min(a % count)
    }

    /// The column that holds position `at`.
    pub(crate) fn column_of(&self, at: usize) -> usize {
        let columns = self.columns();
        match self.shape {
            Shape::Whole => 0,
            Shape::Contiguous { len } => (self.before + at - self.first) / len,
            Shape::Strided { .. } => {
                // The first column that ends after it.
                let (mut low, mut high) = (columns.start, columns.end);
                while low < high {
                    let middle = low.midpoint(high);
                    if self.column(middle).end <= at { low = middle + 1 } else { high = middle }
                }
                low
            }
        }
    }

    /// Whether column order is the order of the flat buffer.
    pub(crate) fn in_order(&self) -> bool {
        !matches!(self.shape, Shape::Strided { .. })
    }

    /// The elements in their own order, cut so that a piece is within a row where columns are strided, else within a column:
    /// first column, whether the next element is of the next column, and elements from the block's start.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (usize, bool, Range<usize>)> {
        let (before, len) = (self.before, self.range.len());
        let (period, along) = match self.shape {
            Shape::Whole => (before + len, false),
            Shape::Contiguous { len } => (len, false),
            Shape::Strided { count } => (count, true),
        };
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = at;
            let (row, within) = ((before + start) / period.max(1), (before + start) % period.max(1));
            at = len.min(start + period - within);
            (start < len).then_some((if along { within } else { row }, along, start..at))
        })
    }

    /// Calls `f` with stretches of a range in column order: position within the range, first element from the block's start,
    /// distance of elements, and number of elements. In tiles of a few columns, so that neighbours in a row are visited while
    /// they are in the cache.
    fn stretches(&self, range: &Range<usize>, mut f: impl FnMut(usize, usize, usize, usize)) {
        let Shape::Strided { count } = self.shape else {
            f(0, range.start - self.first, 1, range.len());
            return;
        };
        const ROWS: usize = 64;
        const COLUMNS: usize = 16;
        if range.is_empty() {
            return;
        }
        let (first, last) = (self.column_of(range.start), self.column_of(range.end - 1));
        let mut tile = first;
        while tile <= last {
            let end = (tile + COLUMNS).min(last + 1);
            // By column: position in the range, element of the block, rows left.
            let mut open = [(0usize, 0usize, 0usize); COLUMNS];
            for column in tile..end {
                let whole = self.column(column);
                let part = whole.start.max(range.start)..whole.end.min(range.end);
                let row = part.start - whole.start + usize::from(column < self.before % count);
                let element = row * count + column - self.before % count;
                open[column - tile] = (part.start - range.start, element, part.len());
            }
            while open[..end - tile].iter().any(|&(_, _, left)| left > 0) {
                for (position, element, left) in &mut open[..end - tile] {
                    let rows = (*left).min(ROWS);
                    if rows > 0 {
                        f(*position, *element, count, rows);
                        (*position, *element, *left) = (*position + rows, *element + rows * count, *left - rows);
                    }
                }
            }
            tile = end;
        }
    }

    /// Collects a range in column order: `out[i]` from the elements of this block, which lie in `source` in their own order.
    pub(crate) fn gather<S: Copy, T>(&self, range: &Range<usize>, source: &[S], out: &mut [T], map: impl Fn(S) -> T) {
        self.stretches(range, |position, element, stride, len| {
            let out = &mut out[position..position + len];
            if stride == 1 {
                out.iter_mut().zip(&source[element..element + len]).for_each(|(out, &value)| *out = map(value));
            } else {
                let source = source[element..].iter().step_by(stride);
                out.iter_mut().zip(source).for_each(|(out, &value)| *out = map(value));
            }
        });
    }

    /// The reverse of [`Block::gather`].
    pub(crate) fn scatter<S: Copy, T>(
        &self,
        range: &Range<usize>,
        values: &[S],
        target: &mut [T],
        map: impl Fn(S) -> T,
    ) {
        self.stretches(range, |position, element, stride, len| {
            let values = &values[position..position + len];
            if stride == 1 {
                target[element..element + len].iter_mut().zip(values).for_each(|(to, &value)| *to = map(value));
            } else {
                let target = target[element..].iter_mut().step_by(stride);
                target.zip(values).for_each(|(to, &value)| *to = map(value));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn slot(shape: &[i64], input_dim: Option<usize>) -> Slot {
        let numel = shape.iter().product::<i64>() as usize;
        Slot { name: "w".into(), aliases: vec![], shape: shape.to_vec(), offset: 3, numel, input_dim, index: 0 }
    }

    /// The order by its definition: sort the owned elements by column, then by place.
    fn by_definition(shape: Shape, numel: usize, range: &Range<usize>) -> Vec<(usize, usize)> {
        let column = |e: usize| match shape {
            Shape::Whole => 0,
            Shape::Contiguous { len } => e / len,
            Shape::Strided { count } => e % count,
        };
        let mut all: Vec<(usize, usize)> =
            (0..numel).filter(|e| range.contains(&(e + 3))).map(|e| (column(e), e + 3)).collect();
        all.sort_unstable();
        all
    }

    proptest! {
        #[test]
        fn columns_are_ranges_and_gather_follows_them(
            rows in 1i64..90, row in 1i64..40, ends in (0usize..4000, 0usize..4000), output in any::<bool>(),
            input in 0usize..2, cut in (0usize..4000, 0usize..4000),
        ) {
            let slot = slot(&[rows, row], Some(input));
            let axis = if output { Axis::Output } else { Axis::Input };
            let shape = Shape::of(&slot, axis, false);
            let clip = |e: usize| 3 + e % (slot.numel + 1);
            let range = clip(ends.0).min(clip(ends.1))..clip(ends.0).max(clip(ends.1));
            let columns = Columns::new(
                std::slice::from_ref(&slot), &[shape], std::iter::once((0, range.clone())),
            );
            let block = &columns.blocks[0];
            let expected = by_definition(shape, slot.numel, &range);
            // Every element is in its column's range, and its place is found again.
            for (position, &(column, _)) in expected.iter().enumerate() {
                prop_assert!(block.column(column).contains(&position), "{block:?} {position}");
                prop_assert_eq!(block.column_of(position), column);
            }
            let all: usize = (0..shape.count(slot.numel)).map(|c| block.column(c).len()).sum();
            prop_assert_eq!(all, range.len());
            let (a, b) = (cut.0 % (range.len() + 1), cut.1 % (range.len() + 1));
            let part = a.min(b)..a.max(b);
            let source: Vec<usize> = range.clone().collect();
            let mut out = vec![usize::MAX; part.len()];
            block.gather(&part, &source, &mut out, |value| value);
            let wanted: Vec<usize> = expected[part.clone()].iter().map(|&(_, e)| e).collect();
            prop_assert_eq!(&out, &wanted);
            let mut back = vec![0usize; range.len()];
            block.scatter(&part, &out, &mut back, |value| value);
            for (value, element) in back.iter().zip(range) {
                prop_assert_eq!(*value, if wanted.contains(&element) { element } else { 0 });
            }
        }
    }

    #[test]
    fn shapes_follow_the_input_dimension() {
        let linear = slot(&[4, 6], Some(1));
        assert_eq!(Shape::of(&linear, Axis::Input, false), Shape::Strided { count: 6 });
        assert_eq!(Shape::of(&linear, Axis::Output, false), Shape::Contiguous { len: 6 });
        assert_eq!(Shape::of(&slot(&[4, 6], Some(0)), Axis::Input, false), Shape::Contiguous { len: 6 });
        assert_eq!(Shape::of(&slot(&[4], None), Axis::Input, false), Shape::Whole);
        assert_eq!(Shape::of(&slot(&[4, 0], Some(1)), Axis::Input, false), Shape::Whole);
        assert_eq!(Shape::of(&slot(&[4, 3, 2], None), Axis::Input, false), Shape::Whole);
        assert_eq!(Shape::of(&slot(&[4, 3, 2], None), Axis::Input, true), Shape::Strided { count: 6 });
    }
}
