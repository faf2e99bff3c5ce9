//! Where parameters are: at home with those who keep them, on their way, or gathered for use.
//!
//! A sharded unit is gathered before its forward pass and freed after it, gathered again before its backward pass and
//! freed when the backward of the unit before it begins: by then autograd has run everything that reads it, since it
//! always takes the node that was made last. While one unit computes, the next ones are on their way. Root units stay
//! until the micro-batch ends. Every rank gathers the same units in the same order, whatever is done by then.
//!
//! Where parameters lie in host memory ([`super::host`]), what a rank keeps of a unit is fetched over the link first, and
//! gathered from there when the next unit is asked for.

use std::time::{Duration, Instant};

use tch::Tensor;
use zf_sys::heap::{Category, tag};

use super::core::Core;
use super::flat::{FlatState, int, narrow};
use super::host::{Fetch, Host};
use super::party::{self, Party};
use crate::layout::Layout;
use crate::stage::{Reshard, Ticket, Transfers};
use crate::{Error, Result};

/// The places of all units.
pub(crate) struct Residency {
    units: Vec<Home>,
    flats: Vec<Ways>,
    /// Sharded units that ran in this forward pass and will run backward, in order.
    ran: Vec<usize>,
    /// The unit whose backward runs.
    backward: Option<usize>,
    /// Gathered units, root units aside: now, and at most since the start.
    live: usize,
    peak: usize,
    /// Time that backward has waited for parameters since it was last asked.
    waited: Duration,
}

/// One unit's parameters.
#[derive(Default)]
struct Home {
    /// Whether any of its buffers has to be gathered or fetched.
    apart: bool,
    root: bool,
    /// Whether it was run, or left out, in this forward pass.
    passed: bool,
    place: Place,
    /// Updated parameters on their way to those who keep them.
    publishing: Vec<Ticket>,
}

#[derive(Default)]
enum Place {
    #[default]
    Released,
    Coming(Coming),
    Here,
}

/// What of a unit is on its way.
#[derive(Default)]
struct Coming {
    fetches: Vec<Fetched>,
    tickets: Vec<Ticket>,
}

/// One flat's kept parameters on their way from host memory.
struct Fetched {
    flat: usize,
    fetch: Fetch,
    /// Where they land if they are gathered from there; else they land where they are used.
    part: Option<Tensor>,
}

/// The ways of one flat's parameters.
struct Ways {
    gather: Option<Party>,
    /// From the copy that a smaller group keeps between forward and backward.
    regather: Option<Party>,
    publish: Option<Party>,
    /// This rank's part of that copy.
    secondary: Option<Tensor>,
}

/// Which pass parameters are gathered for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    Forward,
    Backward,
}

impl Residency {
    pub(crate) fn new(layout: &Layout, rank: usize, transfers: &Transfers, host: bool) -> Result<Self> {
        if transfers.max_live_units == 0 {
            return Err(Error::Config("max_live_units: at least one unit must be gathered to run, found 0".into()));
        }
        let mut flats = Vec::new();
        for flat in &layout.flats {
            let group = flat.params.group();
            let regather = match transfers.reshard {
                Reshard::Group(size) if group > 1 && size != group => {
                    if size == 0 || !group.is_multiple_of(size) {
                        return Err(Error::Config(format!(
                            "reshard_after_forward: groups of {size} ranks do not divide the {group} ranks over which \
                             parameters are split"
                        )));
                    }
                    Some(size)
                }
                _ => None,
            };
            flats.push(Ways {
                gather: party::gather(flat, rank),
                regather: regather.and_then(|size| party::regather(flat, rank, size)),
                publish: party::publish(flat, rank).filter(|_| flat.trainable),
                secondary: None,
            });
        }
        let units = layout.units.iter().map(|unit| Home {
            apart: host || unit.flats.iter().any(|&flat| layout.flats[flat].params.group() > 1),
            root: unit.root,
            ..Home::default()
        });
        let units = units.collect();
        Ok(Self { units, flats, ran: Vec::new(), backward: None, live: 0, peak: 0, waited: Duration::ZERO })
    }

    /// Whether any unit has to be gathered or fetched.
    pub(crate) fn any_apart(&self) -> bool {
        self.units.iter().any(|unit| unit.apart)
    }

    /// Whether `unit` is freed between its passes.
    pub(crate) fn comes_and_goes(&self, unit: usize) -> bool {
        self.units[unit].apart && !self.units[unit].root
    }

    /// The most units that were gathered at once, root units aside.
    pub(crate) fn peak(&self) -> usize {
        self.peak
    }

    /// Books a wait in backward.
    pub(crate) fn add_waited(&mut self, waited: Duration) {
        self.waited += waited;
    }

    /// Time that backward has waited since the last call.
    pub(crate) fn take_waited(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }
}

impl Core {
    /// Gathers `unit` for its forward pass, and starts to gather what comes after it.
    pub(crate) fn enter_forward(&mut self, unit: usize) -> Result<()> {
        self.pump()?;
        self.wait_published(unit)?;
        if !self.residency.units[unit].apart {
            return Ok(());
        }
        self.make_way_for(unit)?;
        self.bring(unit, Pass::Forward)?;
        self.arrive(unit)?;
        let next: Vec<usize> = (unit + 1..self.residency.units.len())
            // A root unit may run once more after those that follow it.
            .filter(|&other| self.residency.comes_and_goes(other) && !self.residency.units[other].passed)
            .take(self.transfers.prefetch)
            .collect();
        self.prefetch(&next, Pass::Forward)
    }

    /// The forward pass of `unit` is over; `returns` says whether its backward will come.
    pub(crate) fn leave_forward(&mut self, unit: usize, returns: bool) -> Result<()> {
        self.residency.units[unit].passed = true;
        if !self.residency.comes_and_goes(unit) {
            return Ok(());
        }
        if returns {
            self.residency.ran.push(unit);
            match self.transfers.reshard {
                Reshard::Keep => return Ok(()),
                Reshard::Group(_) => self.keep_secondary(unit)?,
                Reshard::Shard => {}
            }
        }
        self.free(unit)
    }

    /// This forward pass leaves `unit` out, which may be on its way already.
    pub(crate) fn skip_forward(&mut self, unit: usize) -> Result<()> {
        self.residency.units[unit].passed = true;
        if self.residency.comes_and_goes(unit) { self.free(unit) } else { Ok(()) }
    }

    /// Backward begins: the unit that ran last is needed first.
    pub(crate) fn begin_backward(&mut self) -> Result<()> {
        let last: Vec<usize> = self.residency.ran.last().copied().into_iter().collect();
        self.prefetch(&last, Pass::Backward)
    }

    /// Gathers `unit` for its backward pass, frees the one that came before in backward, and starts to gather the next.
    pub(crate) fn enter_backward(&mut self, unit: usize) -> Result<()> {
        if self.residency.backward == Some(unit) {
            return Ok(());
        }
        let start = Instant::now();
        if let Some(done) = self.residency.backward.replace(unit) {
            self.free(done)?;
        }
        if self.transfers.reshard != Reshard::Keep {
            self.make_way_for(unit)?;
        }
        self.bring(unit, Pass::Backward)?;
        self.arrive(unit)?;
        let position = self.residency.ran.iter().position(|&ran| ran == unit).unwrap_or(0);
        let next: Vec<usize> =
            self.residency.ran[..position].iter().rev().take(self.transfers.prefetch).copied().collect();
        self.prefetch(&next, Pass::Backward)?;
        self.residency.waited += start.elapsed();
        Ok(())
    }

    /// The micro-batch is over: nothing stays gathered.
    pub(crate) fn end_pass(&mut self) -> Result<()> {
        for unit in 0..self.residency.units.len() {
            self.free(unit)?;
        }
        self.residency.flats.iter_mut().for_each(|ways| ways.secondary = None);
        self.residency.ran.clear();
        self.residency.backward = None;
        self.residency.units.iter_mut().for_each(|unit| unit.passed = false);
        if self.residency.live != 0 {
            return Err(Error::Engine(format!("{} units are live after the pass", self.residency.live)));
        }
        Ok(())
    }

    /// Gathers all units one after the other, as a forward pass without gradients would: for a rank that has no batch
    /// while others have.
    pub(crate) fn walk(&mut self) -> Result<()> {
        for unit in 0..self.residency.units.len() {
            self.enter_forward(unit)?;
            self.leave_forward(unit, false)?;
        }
        self.end_pass()
    }

    /// Starts to send the parameters of a flat from the owners of their states to all who keep them.
    pub(crate) fn publish(&mut self, index: usize) -> Result<()> {
        let Some(party) = self.residency.flats[index].publish.clone() else { return Ok(()) };
        let flat = &self.flats[index];
        let (unit, home, kept) = (flat.spec.unit, flat.home.shallow_clone(), flat.kept.clone());
        let tickets = self.all_gather(&party, index, "parameters", (&home, &kept), (&home, &kept))?;
        self.residency.units[unit].publishing.extend(tickets);
        Ok(())
    }

    /// Waits until the parameters of `unit` are those of the last update. The time spent is the caller's stall.
    pub(crate) fn wait_published(&mut self, unit: usize) -> Result<()> {
        for index in 0..self.layout.units[unit].flats.len() {
            let flat = self.layout.units[unit].flats[index];
            // Whoever calls this measures the wait.
            self.with_offload(|offload, core| offload.receive(core, flat).map(|()| offload.take_waited()))?;
        }
        let tickets = std::mem::take(&mut self.residency.units[unit].publishing);
        self.wait(tickets, || format!("parameters of {} to be published", self.layout.units[unit].name))
    }

    /// Receives what an offload has not sent on yet: of units that this rank leaves out, or of all where it has no batch, while
    /// other ranks wait for its part of them.
    pub(crate) fn receive_all(&mut self) -> Result<()> {
        self.with_offload(|offload, core| offload.receive_all(core)).map(drop)
    }

    /// Waits until all parameters are those of the last update.
    pub(crate) fn wait_all_published(&mut self) -> Result<()> {
        (0..self.residency.units.len()).try_for_each(|unit| self.wait_published(unit))
    }

    /// Starts to gather as many of `units` as may be live.
    fn prefetch(&mut self, units: &[usize], pass: Pass) -> Result<()> {
        for unit in 0..self.residency.units.len() {
            self.hand_round(unit)?;
        }
        for &unit in units {
            if self.has_room() && matches!(self.residency.units[unit].place, Place::Released) {
                self.wait_published(unit)?;
                self.bring(unit, pass)?;
            }
        }
        Ok(())
    }

    /// Frees what was gathered ahead in vain where `unit` would be one too many.
    fn make_way_for(&mut self, unit: usize) -> Result<()> {
        if !self.residency.comes_and_goes(unit) || !matches!(self.residency.units[unit].place, Place::Released) {
            return Ok(());
        }
        for other in 0..self.residency.units.len() {
            let kept = self.transfers.reshard == Reshard::Keep && self.residency.ran.contains(&other);
            if other != unit && !kept && self.residency.comes_and_goes(other) && !self.has_room() {
                self.free(other)?;
            }
        }
        Ok(())
    }

    /// Whether one more unit may be live. Those that wait for their backward by the setting do not count.
    fn has_room(&self) -> bool {
        let kept = if self.transfers.reshard == Reshard::Keep { self.residency.ran.len() } else { 0 };
        self.residency.live.saturating_sub(kept) < self.transfers.max_live_units
    }

    /// Starts to gather `unit`, unless it is gathered or on its way.
    fn bring(&mut self, unit: usize, pass: Pass) -> Result<()> {
        if !matches!(self.residency.units[unit].place, Place::Released) {
            return Ok(());
        }
        let mut coming = Coming::default();
        for index in self.layout.units[unit].flats.clone() {
            let ways = &self.residency.flats[index];
            let secondary = ways.secondary.as_ref().filter(|_| pass == Pass::Backward).map(Tensor::shallow_clone);
            let way = if secondary.is_some() { &ways.regather } else { &ways.gather };
            let party = way.clone();
            let flat = &self.flats[index];
            if let Some(host) = self.host.as_ref().filter(|_| secondary.is_none()) {
                coming.fetches.push(fetch(host, index, flat, party.is_some())?);
                continue;
            }
            let Some(party) = party else {
                self.restore_alone(index, secondary)?;
                continue;
            };
            flat.make_room()?;
            let (full, everything) = (flat.params.shallow_clone(), Vec::from_iter(Some(0..flat.spec.numel)));
            let (source, have) = match secondary {
                Some(part) => (part, party.pieces[self.member(&party.group)?].clone()),
                None => (flat.home.shallow_clone(), flat.kept.clone()),
            };
            let tickets = self.all_gather(&party, index, "gather", (&source, &have), (&full, &everything))?;
            coming.tickets.extend(tickets);
        }
        self.residency.units[unit].place = Place::Coming(coming);
        if !self.residency.units[unit].root {
            self.residency.live += 1;
            self.residency.peak = self.residency.peak.max(self.residency.live);
        }
        Ok(())
    }

    /// Fills a flat from a secondary copy that this rank keeps alone.
    fn restore_alone(&self, index: usize, secondary: Option<Tensor>) -> Result<()> {
        if let Some(copy) = secondary {
            let flat = &self.flats[index];
            flat.make_room()?;
            tch::no_grad(|| flat.params.shallow_clone().f_copy_(&copy))?;
        }
        Ok(())
    }

    /// Starts to gather what of `unit` was fetched for that; waits for it if it has not arrived.
    fn hand_round(&mut self, unit: usize) -> Result<()> {
        let Place::Coming(coming) = &mut self.residency.units[unit].place else { return Ok(()) };
        let fetched: Vec<Fetched> = coming.fetches.extract_if(.., |fetched| fetched.part.is_some()).collect();
        for Fetched { flat: index, fetch, part } in fetched {
            self.wait_fetched(unit, fetch)?;
            let (Some(part), Some(party)) = (part, self.residency.flats[index].gather.clone()) else { continue };
            let flat = &self.flats[index];
            flat.make_room()?;
            let (full, everything) = (flat.params.shallow_clone(), Vec::from_iter(Some(0..flat.spec.numel)));
            let have = flat.kept.clone();
            let tickets = self.all_gather(&party, index, "gather", (&part, &have), (&full, &everything))?;
            if let Place::Coming(coming) = &mut self.residency.units[unit].place {
                coming.tickets.extend(tickets);
            }
        }
        Ok(())
    }

    fn wait_fetched(&self, unit: usize, fetch: Fetch) -> Result<()> {
        let reason = || format!("parameters of {} to come from the host", self.layout.units[unit].name);
        let _wait = (!fetch.is_done()).then(|| self.trace.wait("wait", reason()));
        fetch.wait()
    }

    /// Waits until `unit` is here.
    fn arrive(&mut self, unit: usize) -> Result<()> {
        self.hand_round(unit)?;
        if let Place::Coming(coming) = std::mem::replace(&mut self.residency.units[unit].place, Place::Here) {
            coming.fetches.into_iter().try_for_each(|fetched| self.wait_fetched(unit, fetched.fetch))?;
            self.wait(coming.tickets, || format!("parameters of {} to be gathered", self.layout.units[unit].name))?;
        }
        Ok(())
    }

    /// Gives the memory of a gathered unit back.
    fn free(&mut self, unit: usize) -> Result<()> {
        if matches!(self.residency.units[unit].place, Place::Released) {
            return Ok(());
        }
        self.arrive(unit)?;
        for &index in &self.layout.units[unit].flats {
            self.flats[index].release()?;
        }
        self.residency.units[unit].place = Place::Released;
        if !self.residency.units[unit].root {
            self.residency.live -= 1;
        }
        Ok(())
    }

    /// Keeps this rank's part of the copy from which a smaller group will gather for backward.
    fn keep_secondary(&mut self, unit: usize) -> Result<()> {
        let Reshard::Group(size) = self.transfers.reshard else { return Ok(()) };
        for &index in &self.layout.units[unit].flats {
            let flat = &self.flats[index];
            if flat.spec.params.group() == 1 || size == flat.spec.params.group() {
                continue;
            }
            let part = flat.spec.numel / size;
            let member = self.transport.rank() % size;
            let _tag = tag(Category::Buffers);
            let copy = tch::no_grad(|| {
                let own = narrow(&flat.params, member * part..(member + 1) * part)?;
                let mut copy = Tensor::f_empty([int(part)?], (own.kind(), own.device()))?;
                copy.f_copy_(&own)?;
                Ok::<_, Error>(copy)
            })?;
            self.residency.flats[index].secondary = Some(copy);
        }
        Ok(())
    }

    /// The values of a parameter, gathered where this rank keeps only a part.
    pub(crate) fn values(&mut self, name: &str) -> Result<Tensor> {
        self.wait_all_published()?;
        let found = self.flats.iter().find_map(|flat| {
            let slot = flat.spec.slots.iter().position(|s| s.name == name || s.aliases.iter().any(|a| a == name))?;
            Some((flat.spec.unit, flat.leaves[slot].f_detach()))
        });
        let (unit, values) = found.ok_or_else(|| Error::Engine(format!("the model has no parameter `{name}`")))?;
        let values = values?;
        if !self.residency.units[unit].apart {
            return Ok(values);
        }
        self.bring(unit, Pass::Forward)?;
        self.arrive(unit)?;
        let copy = values.f_detach_copy()?;
        self.free(unit)?;
        Ok(copy)
    }
}

/// Starts to bring what this rank keeps of a flat from host memory: to where it is used, or to where it is gathered from.
fn fetch(host: &Host, index: usize, flat: &FlatState, gathers: bool) -> Result<Fetched> {
    let part = match gathers {
        true => {
            let _tag = tag(Category::Buffers);
            Some(Tensor::f_empty(flat.home.size(), (flat.home.kind(), flat.device()))?)
        }
        false => None,
    };
    let to = match &part {
        Some(part) => part.shallow_clone(),
        None => {
            flat.make_room()?;
            flat.params.shallow_clone()
        }
    };
    Ok(Fetched { flat: index, fetch: host.fetch(flat.home.shallow_clone(), to)?, part })
}
