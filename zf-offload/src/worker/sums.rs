//! The gradients of a window, added up in host memory.

use std::collections::BTreeMap;
use std::ops::Range;

use half::bf16;
use tch::{Device, Kind, Tensor};
use zf_core::norm::{Kernel, Level, f32_from_bf16};
use zf_core::stage::Landing;
use zf_core::{Error, Result};
use zf_sys::heap::{Category, tag};
use zf_sys::storage::{slice, slice_mut};

/// Sums of the present window and of the update that is being made: two arrays a buffer, exchanged where a window ends.
pub(super) struct Sums {
    lens: Vec<usize>,
    wire: Vec<Kind>,
    /// By buffer; made when first needed.
    growing: Vec<Option<Tensor>>,
    complete: Vec<Option<Tensor>>,
    window: u64,
    landed: u64,
    /// Sums of a resumed run, by window and buffer, until their window comes.
    kept: BTreeMap<u64, BTreeMap<usize, Vec<f32>>>,
}

impl Sums {
    pub(super) fn new(lens: &[usize], wire: &[Kind]) -> Self {
        let none = || lens.iter().map(|_| None).collect();
        Self {
            lens: lens.to_vec(),
            wire: wire.to_vec(),
            growing: none(),
            complete: none(),
            window: 0,
            landed: 0,
            kept: BTreeMap::new(),
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
        (self.window, self.landed) = (self.window + 1, 0);
        self.take_kept()
    }

    /// The update is made: its arrays serve the window that grows, where that has none yet. With sums on the device nothing lands
    /// until a window's end, so that one array a buffer is enough.
    pub(super) fn release(&mut self) {
        for (growing, complete) in self.growing.iter_mut().zip(&mut self.complete) {
            if growing.is_none() {
                *growing = complete.take();
            }
        }
    }

    fn take_kept(&mut self) -> Result<()> {
        for (buffer, values) in self.kept.remove(&self.window).unwrap_or_default() {
            // SAFETY: the arrays are this value's own.
            let sums = unsafe { slice_mut::<f32>(array(&mut self.growing[buffer], self.lens[buffer])?)? };
            sums.copy_from_slice(&values);
        }
        Ok(())
    }

    /// Adds a landing of the growing window.
    pub(super) fn land(&mut self, landing: &Landing) -> Result<()> {
        let Landing { buffer, ranges, values, scale, replace, .. } = landing;
        let (buffer, scale, replace) = (*buffer, *scale, *replace);
        self.landed += 1;
        let (Some(&len), Some(&wire)) = (self.lens.get(buffer), self.wire.get(buffer)) else {
            return Err(Error::Engine(format!("gradients of a buffer number {buffer} landed, which does not exist")));
        };
        let total: usize = ranges.iter().map(ExactSizeIterator::len).sum();
        let bytes = total * wire.elt_size_in_bytes();
        let values = values.f_narrow(0, 0, bytes as i64)?.f_view_dtype(wire)?;
        // SAFETY: the arrays are this value's own.
        let sums = unsafe { slice_mut::<f32>(array(&mut self.growing[buffer], len)?)? };
        match wire {
            Kind::Float => add(slice::<f32>(&values)?, ranges, sums, scale, replace),
            _ => add(slice::<bf16>(&values)?, ranges, sums, scale, replace),
        }
        Ok(())
    }

    /// The gradients of the update that is being made.
    pub(super) fn complete(&mut self, buffer: usize) -> Result<&[f32]> {
        Ok(slice::<f32>(array(&mut self.complete[buffer], self.lens[buffer])?)?)
    }

    /// A copy of what `window` has, which is complete or grows, or is that of a resumed run and has not begun to grow.
    pub(super) fn copy(&mut self, complete: bool, window: u64, buffer: usize) -> Result<Vec<f32>> {
        if let Some(kept) = self.kept.get(&window).and_then(|kept| kept.get(&buffer)) {
            return Ok(kept.clone());
        }
        let arrays = if complete { &mut self.complete } else { &mut self.growing };
        Ok(slice::<f32>(array(&mut arrays[buffer], self.lens[buffer])?)?.to_vec())
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
