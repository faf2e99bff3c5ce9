//! The state of an engine by logical element: import, export, hash, and the change of stages in mid-run.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};
use zf_sys::storage::slice;

use super::core::{Core, lock};
use super::flat::{FlatState, narrow};
use super::offload::{Absorbed, Saved};
use super::store::{MASTERS, Store};
use super::{Engine, Stages};
use crate::checkpoint::{DTypeName, MASTER, PARAMETER, Piece, StateHasher};
use crate::loss_scale::{LossScaleState, LossScaler};
use crate::model::UnitSpec;
use crate::stage::{Optimizer, Transport};
use crate::weights::Weights;
use crate::{Error, Result};

/// Where a resumed engine reads its state, by logical element.
pub trait StateSource {
    /// Copies elements `range` of the tensor (`name`, `kind`) into `out`.
    ///
    /// # Errors
    /// A missing tensor or damaged file, naming it.
    fn read(&self, name: &str, kind: &str, range: Range<usize>, out: &mut [f32]) -> Result<()>;

    /// Whether the tensor exists.
    fn has(&self, name: &str, kind: &str) -> bool;

    /// Updates made to the parameter `name`.
    fn count(&self, name: &str) -> u64;
}

/// Counters of an engine that a checkpoint keeps beside tensors.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Progress {
    /// Steps taken, skipped ones included.
    pub step: u64,
    /// Updates made.
    pub updates: u64,
    /// Steps skipped in a row.
    pub skipped_in_a_row: u32,
    /// The loss scaler's state in float16.
    pub loss_scale: Option<LossScaleState>,
    /// Where an offload stands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offload: Option<Saved>,
}

/// Fills all buffers from initial weights, one parameter at a time. Masters start from unrounded values.
pub(crate) fn load_weights(store: &mut Store<'_>, units: &[UnitSpec], weights: &dyn Weights) -> Result<()> {
    for index in 0..store.flats.len() {
        let flat = &store.flats[index];
        for (slot, place) in flat.spec.slots.iter().enumerate() {
            let spec = &units[flat.spec.unit].params[place.index];
            let values = weights.load(spec)?;
            if values.size() != spec.shape {
                return Err(Error::Input(format!(
                    "`{}` has shape {:?} where {:?} is expected",
                    spec.name,
                    values.size(),
                    spec.shape
                )));
            }
            let values = values.f_to_kind(Kind::Float)?.f_contiguous()?.f_view([-1])?;
            set_parameter(store, index, slot, &values)?;
        }
    }
    Ok(())
}

/// Sets what this rank keeps of a parameter and owns of its master from its float32 values `[numel]`.
fn set_parameter(store: &mut Store<'_>, index: usize, slot: usize, values: &Tensor) -> Result<()> {
    let flat = &store.flats[index];
    let offset = flat.spec.slots[slot].offset;
    let part = |range: &Range<usize>| narrow(values, range.start - offset..range.end - offset);
    for segment in flat.segments(&flat.kept).iter().filter(|segment| segment.slot == slot) {
        flat.param(&segment.range)?.f_copy_(&part(&segment.range)?)?;
    }
    if store.has_master(index) {
        set_array(store, index, slot, MASTERS, values)?;
    }
    Ok(())
}

/// Sets what this rank owns of an array of a slot from its values `[numel]`.
fn set_array(store: &mut Store<'_>, index: usize, slot: usize, array: usize, values: &Tensor) -> Result<()> {
    let flat = &store.flats[index];
    let offset = flat.spec.slots[slot].offset;
    for segment in flat.segments(&flat.owned).iter().filter(|segment| segment.slot == slot) {
        let part = narrow(values, segment.range.start - offset..segment.range.end - offset)?;
        store.write(index, array, &segment.range, &part)?;
    }
    Ok(())
}

/// Fills all buffers from saved state, reading only what this rank keeps or owns. Returns the updates of each parameter.
pub(crate) fn load_state(store: &mut Store<'_>, kinds: &[&str], source: &dyn StateSource) -> Result<Vec<Vec<u64>>> {
    let mut all_counts = Vec::new();
    for at in 0..store.flats.len() {
        let flat = &store.flats[at];
        let mut counts = Vec::new();
        for index in 0..flat.spec.slots.len() {
            let (name, offset) = (flat.spec.slots[index].name.clone(), flat.spec.slots[index].offset);
            let read = |kind: &str, range: &Range<usize>| {
                let mut values = vec![0f32; range.len()];
                source.read(&name, kind, range.start - offset..range.end - offset, &mut values)?;
                Ok::<_, Error>(Tensor::f_from_slice(&values)?)
            };
            // A parameter may have been frozen then and not now, or the other way round.
            let (kind, other) = if flat.spec.trainable { (MASTER, PARAMETER) } else { (PARAMETER, MASTER) };
            let kind = if !source.has(&name, kind) && source.has(&name, other) { other } else { kind };
            if flat.spec.slots[index].numel == 0 {
                source.read(&name, kind, 0..0, &mut [])?;
            }
            for segment in flat.segments(&flat.kept).iter().filter(|segment| segment.slot == index) {
                flat.param(&segment.range)?.f_copy_(&read(kind, &segment.range)?)?;
            }
            // Bias correction counts the updates that the moments have seen: new ones start at zero, and so does it.
            let moments = kinds.iter().all(|kind| source.has(&name, kind));
            counts.push(if moments { source.count(&name) } else { 0 });
            for segment in flat.segments(&flat.owned).iter().filter(|segment| segment.slot == index) {
                if store.has_master(at) {
                    store.write(at, MASTERS, &segment.range, &read(kind, &segment.range)?)?;
                }
                for (state, kind) in kinds.iter().enumerate().take(store.states(at)) {
                    if source.has(&name, kind) {
                        store.write(at, 1 + state, &segment.range, &read(kind, &segment.range)?)?;
                    }
                }
            }
        }
        all_counts.push(counts);
    }
    Ok(all_counts)
}

/// A tensor of an engine's state: index of flat and slot, name, and number of the array (`None`: a frozen parameter, or
/// what an offload keeps further).
struct Logical {
    flat: usize,
    slot: usize,
    name: String,
    kind: &'static str,
    array: Option<usize>,
}

impl Engine {
    /// The parts of the state that this rank saves: every element is saved by exactly one rank. Copies, so that the
    /// next step may begin.
    ///
    /// # Errors
    /// Those of libtorch and of an offload, with rank and step; the other ranks are told.
    pub fn export(&mut self) -> Result<Vec<Piece>> {
        self.try_export().map_err(|error| self.fail(self.step, error))
    }

    fn try_export(&mut self) -> Result<Vec<Piece>> {
        let kinds = self.stages.optimizer.state();
        let core = &mut *lock(&self.shared);
        core.wait_all_published()?;
        let further = core.settle_offload()?;
        let mut pieces = Vec::new();
        let rank = core.transport.rank();
        let mut store = Store { flats: &core.flats, offload: core.offload.as_mut() };
        for (index, flat) in core.flats.iter().enumerate() {
            for logical in logical_of(flat, index, kinds, &further) {
                let spec = &flat.spec.slots[logical.slot];
                let frozen = !flat.spec.trainable;
                let dtype = if frozen { DTypeName::from(flat.spec.dtype) } else { DTypeName::F32 };
                let piece = |range, data| Piece {
                    name: logical.name.clone(),
                    kind: logical.kind.into(),
                    shape: spec.shape.clone(),
                    dtype,
                    range,
                    data,
                };
                if spec.numel == 0 && rank == 0 {
                    // Nobody owns an element of it, and yet a checkpoint has to know it.
                    pieces.push(piece(0..0, Vec::new()));
                }
                for (range, tensor) in parts(&mut store, &logical)? {
                    let tensor = tensor.f_to_device(Device::Cpu)?;
                    let data = if frozen { raw_bytes(&tensor)? } else { bytes_of(slice::<f32>(&tensor)?) };
                    pieces.push(piece(range.start - spec.offset..range.end - spec.offset, data));
                }
            }
        }
        Ok(pieces)
    }

    /// Updates made to each trainable parameter, by name. Where an offload has updated columns of a parameter differently
    /// often, the most; and under the name with ` (columns)` the first bytes of the blake3 of all columns' counts.
    pub fn counts(&self) -> BTreeMap<String, u64> {
        let core = lock(&self.shared);
        if let Some(offload) = &core.offload {
            let (mut counts, each) = offload.counts(&core.flats);
            counts.extend(each.iter().map(|(name, counts)| (format!("{name} (columns)"), digest(counts))));
            return counts;
        }
        let trainable = core.flats.iter().filter(|flat| flat.spec.trainable);
        trainable
            .flat_map(|flat| flat.spec.slots.iter().zip(&flat.counts).map(|(slot, &count)| (slot.name.clone(), count)))
            .collect()
    }

    /// Counters that a checkpoint keeps beside tensors.
    pub fn progress(&self) -> Progress {
        Progress {
            step: self.step,
            updates: self.updates,
            skipped_in_a_row: self.skipped_in_a_row,
            loss_scale: self.scaler.as_ref().map(LossScaler::state),
            offload: {
                let core = lock(&self.shared);
                core.offload.as_ref().map(|offload| offload.save(&core.flats))
            },
        }
    }

    /// Puts saved state in the place of the present one; all ranks must call it. Returns what a person should know: an open
    /// update window that had to be ended, counts that became coarser.
    ///
    /// # Errors
    /// Those of the source.
    pub fn import(&mut self, source: &dyn StateSource, progress: Progress) -> Result<Vec<String>> {
        let notes = {
            let core = &mut *lock(&self.shared);
            core.wait_all_published()?;
            tch::no_grad(|| core.load(&self.stages.optimizer, source, &progress))?
        };
        self.restore(progress)?;
        Ok(notes)
    }

    /// blake3 over masters, moments and counts in the order of names, independent of the layout; the same on all ranks,
    /// all of which must call it. One logical tensor is gathered at a time.
    ///
    /// # Errors
    /// Those of the transport.
    pub fn state_hash(&mut self) -> Result<String> {
        let counts = self.counts();
        let mut hasher = StateHasher::new();
        let gathered = self.for_each_logical(&mut |name, kind, values| {
            hasher.add(name, kind, &bytes_of(values));
            Ok(())
        });
        gathered.map_err(|error| self.fail(self.step, error))?;
        counts.iter().for_each(|(name, count)| hasher.add_count(name, *count));
        Ok(hasher.finish())
    }

    /// Calls `f` with every tensor of the state (name, kind, values) in the order of names and kinds, gathered over the
    /// ranks, all of which must call this.
    ///
    /// # Errors
    /// Those of the transport and of `f`.
    pub fn for_each_logical(&mut self, f: &mut dyn FnMut(&str, &str, &[f32]) -> Result<()>) -> Result<()> {
        let kinds = self.stages.optimizer.state();
        let core = &mut *lock(&self.shared);
        core.wait_all_published()?;
        core.settle_offload()?;
        let mut store = Store { flats: &core.flats, offload: core.offload.as_mut() };
        gather_each(&mut store, kinds, &mut *core.transport, f)
    }

    /// The same training under other stages: the state moves by logical element into the new layout. All ranks must
    /// call it. Optimizer states that the new rule does not share start at zero. Beside the old and the new shards, one
    /// tensor is in memory at a time.
    ///
    /// # Errors
    /// Those of the new stages and of the transport.
    pub fn rebuild(mut self, stages: Stages) -> Result<Self> {
        self.drain()?;
        let (progress, counts, kinds) = (self.progress(), self.counts(), self.stages.optimizer.state());
        let (parts, transport, old, mut old_offload) = self.into_parts()?;
        let mut engine = Self::assemble(parts, stages, transport)?;
        let new_kinds = engine.stages.optimizer.state();
        {
            let core = &mut *lock(&engine.shared);
            let places: BTreeMap<String, (usize, usize)> = core
                .flats
                .iter()
                .enumerate()
                .flat_map(|(flat, state)| {
                    state.spec.slots.iter().enumerate().map(move |(slot, spec)| (spec.name.clone(), (flat, slot)))
                })
                .collect();
            let Core { flats, offload, transport, .. } = core;
            // Drained: which columns are where, how often each was updated, and what the selector knows.
            let continued = match (offload.as_mut(), progress.offload.as_ref()) {
                (Some(offload), Some(saved)) if offload.continues(saved) => {
                    offload.restore(saved, flats)?;
                    Some(saved)
                }
                (Some(offload), _) => {
                    offload.begin_after(progress.updates);
                    None
                }
                (None, _) => None,
            };
            let mut new = Store { flats, offload: offload.as_mut() };
            let mut old = Store { flats: &old, offload: old_offload.as_mut() };
            gather_each(&mut old, kinds, &mut **transport, &mut |name, kind, values| {
                let &(flat, slot) =
                    places.get(name).ok_or_else(|| Error::Engine(format!("no place for the state of `{name}`")))?;
                let values = Tensor::f_from_slice(values)?;
                match new_kinds.iter().position(|known| *known == kind) {
                    _ if kind == MASTER || kind == PARAMETER => set_parameter(&mut new, flat, slot, &values),
                    Some(index) if new.flats[flat].spec.trainable => {
                        set_array(&mut new, flat, slot, 1 + index, &values)
                    }
                    _ => Ok(()),
                }
            })?;
            // Bias correction counts the updates that the moments have seen.
            let shared = new_kinds.iter().all(|kind| kinds.contains(kind));
            for (index, flat) in core.flats.iter_mut().enumerate() {
                for (slot, (place, count)) in flat.spec.slots.iter().zip(&mut flat.counts).enumerate() {
                    *count = counts.get(&place.name).copied().filter(|_| shared).unwrap_or(0);
                    let by_column = shared && continued.is_some_and(|saved| saved.counts.contains_key(&place.name));
                    if let Some(offload) = core.offload.as_mut().filter(|_| !by_column) {
                        offload.set_count(index, slot, *count);
                    }
                }
            }
        }
        engine.restore(progress)?;
        Ok(engine)
    }

    /// Puts saved counters in the place of the present ones.
    fn restore(&mut self, progress: Progress) -> Result<()> {
        self.step = progress.step;
        self.updates = progress.updates;
        self.skipped_in_a_row = progress.skipped_in_a_row;
        if let (Some(scaler), Some(state)) = (&mut self.scaler, progress.loss_scale) {
            scaler.restore(state)?;
        }
        Ok(())
    }
}

impl Core {
    /// Waits until an offload has made what was submitted; which tensors a checkpoint has to keep beside the state.
    fn settle_offload(&mut self) -> Result<Vec<&'static str>> {
        let further = self.with_offload(|offload, core| {
            offload.settle(&core.trace)?;
            Ok(offload.further())
        })?;
        Ok(further.unwrap_or_default())
    }

    /// Fills everything from saved state; what a person should know of it.
    fn load(
        &mut self,
        optimizer: &Arc<dyn Optimizer>,
        source: &dyn StateSource,
        progress: &Progress,
    ) -> Result<Vec<String>> {
        // What an import into a running engine replaces must not arrive afterwards.
        self.with_offload(|offload, core| offload.drain(core))?;
        let (kinds, saved) = (optimizer.state(), progress.offload.as_ref());
        let continued = saved.filter(|saved| self.offload.as_ref().is_some_and(|offload| offload.continues(saved)));
        let absorbed = saved
            .filter(|_| continued.is_none())
            .map(|saved| Absorbed::new(saved, source, Arc::clone(optimizer), &self.flats))
            .transpose()?;
        let source = absorbed.as_ref().map_or(source, |absorbed| absorbed as &dyn StateSource);
        let mut notes = absorbed.as_ref().map_or_else(Vec::new, Absorbed::notes);
        let flats = &self.flats;
        match (&mut self.offload, continued) {
            (Some(offload), Some(saved)) => notes.extend(offload.restore(saved, flats)?),
            (Some(offload), None) => offload.begin_after(progress.updates),
            (None, _) => {}
        }
        let mut store = Store { flats, offload: self.offload.as_mut() };
        let counts = load_state(&mut store, kinds, source)?;
        for (index, counts) in counts.into_iter().enumerate() {
            for (slot, &count) in counts.iter().enumerate() {
                let name = &self.flats[index].spec.slots[slot].name;
                // New moments have seen no update, whatever columns counted.
                let fresh = !kinds.iter().all(|kind| source.has(name, kind));
                let by_column = !fresh && continued.is_some_and(|saved| saved.counts.contains_key(name));
                if let Some(offload) = self.offload.as_mut().filter(|_| !by_column) {
                    offload.set_count(index, slot, count);
                }
            }
            self.flats[index].counts = counts;
        }
        if let (Some(offload), Some(saved)) = (&mut self.offload, continued) {
            let flats = &self.flats;
            offload.resume(saved, flats, &|index, kind, slot, range| {
                let slot = &flats[index].spec.slots[slot];
                let mut values = vec![0f32; range.len()];
                source.read(&slot.name, kind, range.start - slot.offset..range.end - slot.offset, &mut values)?;
                Ok(Tensor::f_from_slice(&values)?)
            })?;
        }
        self.with_offload(|offload, core| offload.catch_up(core))?;
        Ok(notes)
    }
}

/// Calls `f` with every tensor of the state of `flats` in the order of names and kinds, gathered over all ranks.
fn gather_each(
    store: &mut Store<'_>,
    kinds: &'static [&'static str],
    transport: &mut dyn Transport,
    f: &mut dyn FnMut(&str, &str, &[f32]) -> Result<()>,
) -> Result<()> {
    let mut all: Vec<Logical> =
        store.flats.iter().enumerate().flat_map(|(index, flat)| logical_of(flat, index, kinds, &[])).collect();
    all.sort_by(|a, b| (&a.name, a.kind).cmp(&(&b.name, b.kind)));
    for logical in all {
        let flat = &store.flats[logical.flat];
        let spec = &flat.spec.slots[logical.slot];
        let (offset, mut values) = (spec.offset, vec![0f32; spec.numel]);
        let mut mine = Vec::new();
        for (range, tensor) in parts(store, &logical)? {
            let tensor = tensor.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?;
            mine.extend(((range.start - offset) as u64).to_le_bytes());
            mine.extend((range.len() as u64).to_le_bytes());
            mine.extend(bytes_of(slice::<f32>(&tensor)?));
        }
        let label = format!("state of {}", logical.name);
        for (rank, bytes) in transport.exchange(&label, mine)?.iter().enumerate() {
            scatter(bytes, &mut values)
                .ok_or_else(|| Error::comm(format!("rank {rank} sent a garbled piece of {}", logical.name)))?;
        }
        f(&logical.name, logical.kind, &values)?;
    }
    Ok(())
}

/// The tensors of a flat's state, and those that only a checkpoint keeps.
fn logical_of(
    flat: &FlatState,
    index: usize,
    kinds: &'static [&'static str],
    further: &[&'static str],
) -> Vec<Logical> {
    let mut all = Vec::new();
    for (slot, spec) in flat.spec.slots.iter().enumerate() {
        let logical = |kind, array| Logical { flat: index, slot, name: spec.name.clone(), kind, array };
        if flat.spec.trainable {
            all.push(logical(MASTER, Some(MASTERS)));
            all.extend(kinds.iter().enumerate().map(|(state, kind)| logical(kind, Some(1 + state))));
            all.extend(further.iter().map(|kind| logical(kind, None)));
        } else {
            all.push(logical(PARAMETER, None));
        }
    }
    all
}

/// The parts of a tensor that this rank saves, by element of the flat buffer.
fn parts(store: &mut Store<'_>, logical: &Logical) -> Result<Vec<(Range<usize>, Tensor)>> {
    let flat = &store.flats[logical.flat];
    let saved = flat.segments(&flat.reduction.summed);
    let parts = saved.into_iter().filter(|segment| segment.slot == logical.slot).map(|segment| {
        let tensor = match (logical.array, &mut store.offload) {
            (Some(array), _) => store.read(logical.flat, array, &segment.range)?,
            (None, Some(offload)) if flat.spec.trainable => {
                offload.read_further(flat, logical.flat, logical.kind, &segment.range)?
            }
            (None, _) => flat.param(&segment.range)?,
        };
        Ok((segment.range, tensor))
    });
    parts.collect()
}

/// One number for a list of counts.
fn digest(counts: &[u64]) -> u64 {
    let bytes: Vec<u8> = counts.iter().flat_map(|count| count.to_le_bytes()).collect();
    let hash = blake3::hash(&bytes);
    hash.as_bytes()[..8].iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// Little-endian bytes of float32 values.
fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Bytes of a contiguous CPU tensor of any type.
fn raw_bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    let mut bytes = vec![0u8; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.f_copy_data_u8(&mut bytes, tensor.numel())?;
    Ok(bytes)
}

/// Puts the pieces of another rank in place; `None` if they are garbled.
fn scatter(mut bytes: &[u8], values: &mut [f32]) -> Option<()> {
    while !bytes.is_empty() {
        let (start, rest) = bytes.split_first_chunk::<8>()?;
        let (len, rest) = rest.split_first_chunk::<8>()?;
        let start = usize::try_from(u64::from_le_bytes(*start)).ok()?;
        let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
        let (data, rest) = rest.split_at_checked(len.checked_mul(4)?)?;
        let target = values.get_mut(start..start.checked_add(len)?)?;
        for (value, chunk) in target.iter_mut().zip(data.as_chunks::<4>().0) {
            *value = f32::from_le_bytes(*chunk);
        }
        bytes = rest;
    }
    Some(())
}
