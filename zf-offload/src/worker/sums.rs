//! The gradients of a window, added up in host memory.
//!
//! A landing that is the first of its elements in a window is kept as it came: where no other follows, the update reads it directly,
//! and nothing is written in between.

use std::collections::BTreeMap;
use std::ops::Range;

use half::bf16;
use tch::{Device, Kind, Tensor};
use zf_core::norm::{Kernel, Level, f32_from_bf16};
use zf_core::stage::Landing;
use zf_core::{Error, Result};
use zf_sys::heap::{Category, tag};
use zf_sys::storage::{slice, slice_mut};

/// Sums of the present window and of the update that is being made, exchanged where a window ends.
pub(super) struct Sums {
    lens: Vec<usize>,
    wire: Vec<Kind>,
    growing: Side,
    complete: Side,
    window: u64,
    landed: u64,
    /// Sums of a resumed run, by window and buffer, until their window comes.
    kept: BTreeMap<u64, BTreeMap<usize, Vec<f32>>>,
    /// Memory of landings that nobody needs any more.
    spare: Vec<Tensor>,
    scratch: Vec<f32>,
}

/// The sums of one window.
#[derive(Default)]
struct Side {
    /// By buffer, `[len]`; made when first needed.
    arrays: Vec<Option<Tensor>>,
    /// By buffer: what came last for its elements, instead of what the array has.
    raw: Vec<Vec<Landing>>,
}

impl Sums {
    pub(super) fn new(lens: &[usize], wire: &[Kind]) -> Self {
        let side =
            || Side { arrays: lens.iter().map(|_| None).collect(), raw: lens.iter().map(|_| Vec::new()).collect() };
        Self {
            lens: lens.to_vec(),
            wire: wire.to_vec(),
            growing: side(),
            complete: side(),
            window: 0,
            landed: 0,
            kept: BTreeMap::new(),
            spare: Vec::new(),
            scratch: Vec::new(),
        }
    }

    /// The window that grows.
    pub(super) fn window(&self) -> u64 {
        self.window
    }

    /// Landings of it so far.
    pub(super) fn landed(&self) -> u64 {
        self.landed
    }

    /// Makes `window` the one that grows, where none of its predecessors had anything.
    pub(super) fn skip_to(&mut self, window: u64) -> Result<()> {
        if window > self.window {
            (self.window, self.landed) = (window, 0);
            self.take_kept()?;
        }
        Ok(())
    }

    /// The growing window is complete; the next one grows.
    pub(super) fn exchange(&mut self) -> Result<()> {
        std::mem::swap(&mut self.growing, &mut self.complete);
        for raw in &mut self.growing.raw {
            self.spare.extend(raw.drain(..).map(|landing| landing.values));
        }
        (self.window, self.landed) = (self.window + 1, 0);
        self.take_kept()
    }

    /// The update is made: its arrays serve the window that grows, where that has none yet, and the memory of its landings those
    /// to come.
    pub(super) fn release(&mut self) {
        for (growing, complete) in self.growing.arrays.iter_mut().zip(&mut self.complete.arrays) {
            if growing.is_none() {
                *growing = complete.take();
            }
        }
        for raw in &mut self.complete.raw {
            self.spare.extend(raw.drain(..).map(|landing| landing.values));
        }
    }

    fn take_kept(&mut self) -> Result<()> {
        for (buffer, values) in self.kept.remove(&self.window).unwrap_or_default() {
            // SAFETY: the arrays are this value's own.
            let sums = unsafe { slice_mut::<f32>(array(&mut self.growing.arrays[buffer], self.lens[buffer])?)? };
            sums.copy_from_slice(&values);
        }
        Ok(())
    }

    /// Memory of a landing that nobody needs any more.
    pub(super) fn spare(&mut self) -> Option<Tensor> {
        self.spare.pop()
    }

    /// Takes a landing of the growing window in. Bytes of memory that were read and written.
    pub(super) fn land(&mut self, landing: Landing) -> Result<u64> {
        self.landed += 1;
        let buffer = landing.buffer;
        if buffer >= self.lens.len() {
            return Err(Error::Engine(format!("gradients of a buffer number {buffer} landed, which does not exist")));
        }
        if landing.replace {
            // A step that was skipped may have left the same elements.
            let raw = &mut self.growing.raw[buffer];
            let (old, rest) = std::mem::take(raw).into_iter().partition(|old| overlap(&old.ranges, &landing.ranges));
            *raw = rest;
            let mut bytes = 0;
            for old in old {
                bytes += if old.ranges == landing.ranges { 0 } else { self.fold(&old)? };
                self.spare.push(old.values);
            }
            self.growing.raw[buffer].push(landing);
            return Ok(bytes);
        }
        let mut bytes = 0;
        for old in std::mem::take(&mut self.growing.raw[buffer]) {
            bytes += self.fold(&old)?;
            self.spare.push(old.values);
        }
        bytes += self.fold(&landing)?;
        self.spare.push(landing.values);
        Ok(bytes)
    }

    /// Adds a landing to the array of its buffer, or replaces what is there. Bytes read and written.
    fn fold(&mut self, landing: &Landing) -> Result<u64> {
        let Landing { buffer, ranges, scale, replace, .. } = landing;
        let values = typed(landing, self.wire[*buffer])?;
        // SAFETY: the arrays are this value's own.
        let sums = unsafe { slice_mut::<f32>(array(&mut self.growing.arrays[*buffer], self.lens[*buffer])?)? };
        match self.wire[*buffer] {
            Kind::Float => add(slice::<f32>(&values)?, ranges, sums, *scale, *replace),
            _ => add(slice::<bf16>(&values)?, ranges, sums, *scale, *replace),
        }
        let each = self.wire[*buffer].elt_size_in_bytes() + if *replace { 4 } else { 8 };
        Ok((length(ranges) * each) as u64)
    }

    /// The gradients of elements `range` of the update that is being made.
    pub(super) fn complete(&mut self, buffer: usize, range: &Range<usize>) -> Result<&[f32]> {
        let Self { complete, scratch, wire, lens, .. } = self;
        if complete.raw[buffer].is_empty() {
            return Ok(&slice::<f32>(array(&mut complete.arrays[buffer], lens[buffer])?)?[range.clone()]);
        }
        scratch.clear();
        match &complete.arrays[buffer] {
            Some(array) => scratch.extend_from_slice(&slice::<f32>(array)?[range.clone()]),
            None => scratch.resize(range.len(), 0.0),
        }
        read(&complete.raw[buffer], wire[buffer], range, scratch)?;
        Ok(scratch)
    }

    /// Bytes that reading the gradient of an element of the present update takes.
    pub(super) fn width(&self, buffer: usize) -> usize {
        if self.complete.raw[buffer].is_empty() { 4 } else { self.wire[buffer].elt_size_in_bytes() }
    }

    /// A copy of what `window` has, which is complete or grows, or is that of a resumed run and has not begun to grow.
    pub(super) fn copy(&mut self, complete: bool, window: u64, buffer: usize) -> Result<Vec<f32>> {
        if let Some(kept) = self.kept.get(&window).and_then(|kept| kept.get(&buffer)) {
            return Ok(kept.clone());
        }
        let side = if complete { &mut self.complete } else { &mut self.growing };
        let len = self.lens[buffer];
        let mut sums = slice::<f32>(array(&mut side.arrays[buffer], len)?)?.to_vec();
        read(&side.raw[buffer], self.wire[buffer], &(0..len), &mut sums)?;
        Ok(sums)
    }

    /// Keeps the sums of a resumed run until their window comes.
    pub(super) fn keep(&mut self, window: u64, buffer: usize, values: Vec<f32>) -> Result<()> {
        if values.len() != self.lens[buffer] {
            return Err(Error::Engine(format!("expected {} sums, found {}", self.lens[buffer], values.len())));
        }
        self.kept.entry(window).or_default().insert(buffer, values);
        if window == self.window { self.take_kept() } else { Ok(()) }
    }
}

fn length(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(ExactSizeIterator::len).sum()
}

/// Whether two ascending lists of ranges share an element.
fn overlap(a: &[Range<usize>], b: &[Range<usize>]) -> bool {
    let mut rest = b.iter().peekable();
    a.iter().any(|range| {
        while rest.next_if(|other| other.end <= range.start).is_some() {}
        rest.peek().is_some_and(|other| other.start < range.end)
    })
}

/// A landing's values in their type.
fn typed(landing: &Landing, wire: Kind) -> Result<Tensor> {
    let bytes = length(&landing.ranges) * wire.elt_size_in_bytes();
    Ok(landing.values.f_narrow(0, 0, bytes as i64)?.f_view_dtype(wire)?)
}

/// Copies what landings have of elements `range` over `out`.
fn read(raw: &[Landing], wire: Kind, range: &Range<usize>, out: &mut [f32]) -> Result<()> {
    for landing in raw {
        let first = landing.ranges.partition_point(|own| own.end <= range.start);
        if landing.ranges.get(first).is_none_or(|own| own.start >= range.end) {
            continue;
        }
        let values = typed(landing, wire)?;
        let mut at = length(&landing.ranges[..first]);
        for own in landing.ranges[first..].iter().take_while(|own| own.start < range.end) {
            let part = own.start.max(range.start)..own.end.min(range.end);
            let (from, to) = (at + part.start - own.start, part.start - range.start..part.end - range.start);
            match wire {
                Kind::Float => copy(&slice::<f32>(&values)?[from..from + part.len()], &mut out[to], landing.scale),
                _ => copy(&slice::<bf16>(&values)?[from..from + part.len()], &mut out[to], landing.scale),
            }
            at += own.len();
        }
    }
    Ok(())
}

fn copy<T: Element>(values: &[T], sums: &mut [f32], scale: f32) {
    Level::detect().run(Add { values, sums, scale, replace: true });
}

/// The array of a buffer, made now if it is not there.
fn array(place: &mut Option<Tensor>, len: usize) -> Result<&Tensor> {
    if place.is_none() {
        let _tag = tag(Category::Gradients);
        *place = Some(Tensor::f_zeros([len as i64], (Kind::Float, Device::Cpu))?);
    }
    place.as_ref().ok_or_else(|| Error::Engine("no array".into()))
}

/// A type of gradients on the link.
trait Element: Copy {
    fn float(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    fn float(self) -> f32 {
        self
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn float(self) -> f32 {
        f32_from_bf16(self)
    }
}

fn add<T: Element>(mut values: &[T], ranges: &[Range<usize>], sums: &mut [f32], scale: f32, replace: bool) {
    for range in ranges {
        let (here, rest) = values.split_at(range.len());
        Level::detect().run(Add { values: here, sums: &mut sums[range.clone()], scale, replace });
        values = rest;
    }
}

/// `sum = value * scale`, or `sum + value * scale`, each rounded.
struct Add<'a, T> {
    values: &'a [T],
    sums: &'a mut [f32],
    scale: f32,
    replace: bool,
}

impl<T: Element> Kernel for Add<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { values, sums, scale, replace } = self;
        if replace {
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum = value.float() * scale);
        } else {
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value.float() * scale);
        }
    }
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "lists of ranges, some of which have one")]
mod tests {
    use super::*;

    fn landing(ranges: &[Range<usize>], values: &[f32], scale: f32, replace: bool) -> Landing {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let values = zf_sys::storage::tensor_from(&bytes, &[bytes.len() as i64]).unwrap();
        Landing { window: 0, buffer: 0, ranges: ranges.to_vec(), values, scale, replace }
    }

    #[test]
    fn landings_replace_and_add_by_element() {
        let mut sums = Sums::new(&[8], &[Kind::Float]);
        sums.land(landing(&[0..2, 4..6], &[1.0, 2.0, 3.0, 4.0], 2.0, true)).unwrap();
        assert_eq!(sums.copy(false, 0, 0).unwrap(), [2.0, 4.0, 0.0, 0.0, 6.0, 8.0, 0.0, 0.0]);
        // A skipped step had left the same elements.
        sums.land(landing(&[0..2, 4..6], &[5.0, 5.0, 5.0, 5.0], 1.0, true)).unwrap();
        sums.land(landing(&[6..8], &[7.0, 7.0], 1.0, true)).unwrap();
        assert_eq!(sums.copy(false, 0, 0).unwrap(), [5.0, 5.0, 0.0, 0.0, 5.0, 5.0, 7.0, 7.0]);
        sums.land(landing(&[1..2, 7..8], &[1.0, 1.0], 0.5, false)).unwrap();
        sums.land(landing(&[2..3], &[9.0], 1.0, true)).unwrap();
        let all = [5.0, 5.5, 9.0, 0.0, 5.0, 5.0, 7.0, 7.5];
        assert_eq!(sums.copy(false, 0, 0).unwrap(), all);
        sums.exchange().unwrap();
        assert_eq!(sums.complete(0, &(1..8)).unwrap(), &all[1..]);
        assert_eq!((sums.window(), sums.landed()), (1, 0));
    }

    #[test]
    fn overlapping_lists_are_found() {
        assert!(overlap(&[0..2, 8..9], &[3..4, 8..12]));
        assert!(!overlap(&[0..2, 8..9], &[2..8, 9..12]));
        assert!(!overlap(&[], &[2..8]));
    }
}
