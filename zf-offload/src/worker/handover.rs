//! Columns that change their tier: what the worker hands over, and what it gets.

use std::ops::Range;

use crossbeam_channel::Sender;
use tch::{Kind, Tensor};
use zf_core::Result;
use zf_core::stage::{Arrived, Span, Take, Taken, Transfer, Way};
use zf_sys::heap::{Category, tag};
use zf_sys::storage::{slice, slice_mut};

use super::actor::Actor;
use super::apply;

impl Actor {
    /// Takes elements out, with a pending update applied or with its gradients, and sends them to the device; `reply` learns when they
    /// are there.
    pub(super) fn take(&mut self, take: Take, reply: Sender<Result<Taken>>) -> Result<()> {
        let Take { buffer, ranges, late, into } = take;
        let parts = self.state.present.as_mut().map_or_else(Vec::new, |present| present.work.withdraw(buffer, &ranges));
        let withdrawn = parts.iter().map(|part| part.range.len()).sum();
        for part in parts.iter().filter(|part| !late && part.hyper.is_some()) {
            let grads = self.sums.complete(buffer, &part.range)?;
            apply::update(&mut *self.tier, &*self.optimizer, std::slice::from_ref(part), grads, None, 1)?;
        }
        let len: usize = ranges.iter().map(ExactSizeIterator::len).sum();
        let from = {
            let _tag = tag(Category::Buffers);
            self.link.host_memory((self.arrays + usize::from(late)) * len, Kind::Float)?
        };
        if late {
            // SAFETY: nobody else has the tensor yet.
            let mut rest = &mut unsafe { slice_mut::<f32>(&from)? }[self.arrays * len..];
            for range in &ranges {
                let (here, after) = rest.split_at_mut(range.len());
                here.copy_from_slice(self.sums.complete(buffer, range)?);
                rest = after;
            }
        }
        self.exchange(&[(buffer, ranges)], &from, false)?;
        let done = Box::new(move |result: Result<Arrived>| {
            // The rank may be gone.
            let _ = reply.send(result.map(|arrived| Taken { buffer, values: arrived.to, withdrawn }));
        });
        self.link.issue(Transfer { way: Way::ToDevice, from, to: into, label: "columns".into(), moves: true, done })
    }

    /// Copies all arrays of elements to or from `values`, which has array after array.
    pub(super) fn exchange(
        &mut self,
        elements: &[(usize, Vec<Range<usize>>)],
        values: &Tensor,
        into: bool,
    ) -> Result<()> {
        let len: usize = elements.iter().flat_map(|(_, ranges)| ranges).map(ExactSizeIterator::len).sum();
        let mut at = 0;
        for (buffer, ranges) in elements {
            for range in ranges {
                let span = Span { buffer: *buffer, range: range.clone() };
                self.tier.with(&span, &mut |arrays| {
                    for (index, array) in arrays.iter_mut().enumerate() {
                        let own = index * len + at..index * len + at + array.len();
                        if into {
                            array.copy_from_slice(&slice::<f32>(values)?[own]);
                        } else {
                            // SAFETY: the worker alone has the tensor.
                            let values = unsafe { slice_mut::<f32>(values)? };
                            values[own].copy_from_slice(array);
                        }
                    }
                    Ok(())
                })?;
                at += range.len();
            }
        }
        Ok(())
    }
}
