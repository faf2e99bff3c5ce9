//! Choosing columns again.

use super::score::{self, Weight};
use super::{Offloading, Step};
use crate::engine::core::Core;
use crate::stage::{Candidates, Decision, Every, Interval, Selector};
use crate::{Error, Result};

/// By flat buffer and slot: the chosen columns, ascending; none where nothing is chosen from.
type Choice = Vec<Vec<Option<Vec<u32>>>>;

/// A weight that is chosen from.
struct Place {
    flat: usize,
    slot: usize,
    /// Whether this step updates it.
    used: bool,
}

impl Offloading {
    /// Chooses columns again where the clock says so, or an earlier run did, and moves those that changed.
    pub(super) fn choose(&mut self, core: &mut Core, step: &Step<'_>) -> Result<()> {
        let Some(mut selector) = self.selector.take() else { return Ok(()) };
        let every = selector.every();
        let (may, must) = self.when(every);
        if may {
            let before = selector.clone_box();
            let choice = self.candidates(core, step, &mut *selector)?;
            let turnover = self.turnover(&choice);
            let chooses = must || matches!(every, Every::Turnover(limit) if turnover > limit);
            if chooses {
                self.turnover = Some(turnover);
                self.clock.chose();
                self.adopt(core, &choice)?;
                self.decide_interval(core)?;
            } else {
                selector = before;
            }
            if matches!(every, Every::Turnover(_)) || matches!(self.policy.interval, Interval::Auto { .. }) {
                let (update, interval) = (self.clock.update, self.clock.interval);
                self.decision = Some(Decision { update, interval, choose: chooses });
            }
        }
        self.selector = Some(selector);
        if std::mem::take(&mut self.held) {
            self.pool.go()?;
        }
        Ok(())
    }

    /// Whether columns may be chosen in this step, and whether they are, whatever the candidates.
    fn when(&mut self, every: Every) -> (bool, bool) {
        let Interval::Replay(decisions) = &self.policy.interval else {
            let (may, must) = self.clock.choosing(every);
            // The first measured interval is not put off until columns are due.
            let automatic = matches!(self.policy.interval, Interval::Auto { .. });
            let first = automatic && self.pace.is_new() && self.clock.begins() && !self.clock.warming_up();
            return (may || first, must || first);
        };
        let here = |decision: &&Decision| decision.update == self.clock.update;
        match decisions.iter().find(here).filter(|_| !self.clock.warming_up() && self.clock.begins()) {
            Some(decision) => {
                self.clock.interval = decision.interval;
                (decision.choose, decision.choose)
            }
            None => (false, false),
        }
    }

    /// Takes the interval that rank 0 finds best, where it is automatic.
    fn decide_interval(&mut self, core: &mut Core) -> Result<()> {
        let Interval::Auto { at_most, gradient_rule } = self.policy.interval else { return Ok(()) };
        let mine = self.pace.suggest(self.clock.interval, at_most, gradient_rule).unwrap_or(self.clock.interval);
        let answers = core.transport.exchange("update interval", mine.to_le_bytes().to_vec())?;
        let first = answers.first().and_then(|answer| answer.first_chunk::<8>());
        let first = first.ok_or_else(|| Error::comm("rank 0 sent a garbled update interval"))?;
        self.clock.interval = u64::from_le_bytes(*first).clamp(1, at_most);
        self.pace.decided();
        Ok(())
    }

    /// What the selector would choose now. Weights that this step does not update keep their columns; one that has none yet gets
    /// some, all its scores being 0, so that everything is on the device where everything is to be chosen.
    fn candidates(&mut self, core: &mut Core, step: &Step<'_>, selector: &mut dyn Selector) -> Result<Choice> {
        let mut choice: Choice = Vec::new();
        let mut places = Vec::new();
        for (index, part) in self.parts.iter().enumerate() {
            let Some(part) = part else {
                choice.push(Vec::new());
                continue;
            };
            for (slot, _) in part.split.shapes.iter().enumerate().filter(|(_, shape)| shape.has_columns()) {
                let used = step.chosen[index][slot];
                if used || !part.split.chosen[slot].contains(&true) {
                    places.push(Place { flat: index, slot, used });
                }
            }
            choice.push(vec![None; part.split.shapes.len()]);
        }
        let mut scores = match selector.score() {
            Some(score) => {
                let (mut weights, needs) = (Vec::new(), score.needs());
                if needs.second_moment {
                    // The gradients of a pending update have to be on their way before anybody waits for it.
                    self.outbox.pack_all_of(None, &mut *self.pool, &self.link, &core.trace)?;
                }
                for &Place { flat: index, slot, .. } in places.iter().filter(|place| place.used) {
                    let flat = &core.flats[index];
                    let Some(part) = &self.parts[index] else { continue };
                    let mut weight = Weight::new(flat, slot, &part.split.shapes);
                    for block in &weight.blocks {
                        let range = &block.range;
                        let moment = if needs.second_moment { Some(second_moment(&*self.optimizer)?) } else { None };
                        let inputs = [
                            Some(flat.grad(range)?),
                            needs.weight.then(|| flat.param(range)).transpose()?,
                            moment
                                .map(|state| super::states::rows(&mut *self.pool, part, index, state, range))
                                .transpose()?,
                        ];
                        weight.inputs.push(inputs);
                    }
                    weights.push(weight);
                }
                let _span = core.trace.span(crate::trace::Lane::Compute, "scores");
                Some(score::columns(&weights, score, step.grad_scale, &mut *core.transport)?.into_iter())
            }
            None => None,
        };
        for &Place { flat: index, slot, used } in &places {
            let Some(part) = &self.parts[index] else { continue };
            let zeros = || vec![0.0; part.split.chosen[slot].len()];
            let scores = match &mut scores {
                Some(scores) if used => &scores.next().unwrap_or_else(zeros),
                Some(_) => &zeros(),
                None => &Vec::new(),
            };
            let name = &core.flats[index].spec.slots[slot].name;
            let columns = part.split.chosen[slot].len();
            let previous = part.split.chosen_columns(slot);
            let weight = Candidates { name, columns, scores, previous: &previous, update: self.clock.update };
            let chosen = selector.choose(&weight)?;
            let ascending = chosen.windows(2).all(|pair| pair[0] < pair[1]);
            if !ascending || chosen.last().is_some_and(|&last| last as usize >= columns) {
                return Err(Error::Engine(format!(
                    "the selector chose columns {chosen:?} of `{name}`, which has {columns}; they must ascend, each once"
                )));
            }
            choice[index][slot] = Some(chosen);
        }
        Ok(choice)
    }

    /// The part of all chosen columns that differs: 1 - |both| / |either|, over all weights; 0 where nothing is chosen.
    fn turnover(&self, choice: &Choice) -> f64 {
        let (mut both, mut either) = (0u64, 0u64);
        for (part, slots) in self.parts.iter().zip(choice) {
            let Some(part) = part else { continue };
            for (slot, chosen) in slots.iter().enumerate() {
                let Some(chosen) = chosen else { continue };
                let present = &part.split.chosen[slot];
                let kept = chosen.iter().filter(|&&column| present[column as usize]).count() as u64;
                let before = present.iter().filter(|&&on| on).count() as u64;
                both += kept;
                either += before + chosen.len() as u64 - kept;
            }
        }
        if either == 0 { 0.0 } else { 1.0 - both as f64 / either as f64 }
    }

    /// Makes the chosen columns those on the device.
    fn adopt(&mut self, core: &mut Core, choice: &Choice) -> Result<()> {
        let mut sets = Vec::new();
        for (part, slots) in self.parts.iter().zip(choice) {
            let set = part.as_ref().map(|part| {
                let mut set = part.split.chosen.clone();
                for (slot, chosen) in slots.iter().enumerate() {
                    if let Some(chosen) = chosen {
                        set[slot].fill(false);
                        chosen.iter().for_each(|&column| set[slot][column as usize] = true);
                    }
                }
                set
            });
            sets.push(set);
        }
        self.move_columns(core, sets)
    }
}

/// The index of the rule's running mean of squares among its states.
pub(super) fn second_moment(optimizer: &dyn crate::stage::Optimizer) -> Result<usize> {
    optimizer.state().iter().position(|state| *state == "exp_avg_sq").ok_or_else(|| {
        Error::Config(
            "`select.score`: it needs the running mean of squared gradients, which this update rule does not have"
                .into(),
        )
    })
}
