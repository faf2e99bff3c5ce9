//! The loss scale of float16 training.
//!
//! Gradients below 6e-8 vanish in float16, so the loss is multiplied by a scale before backward and the gradient divided
//! by it after. The dynamic scale grows while gradients stay finite and shrinks when they overflow (Micikevicius et al.,
//! "Mixed Precision Training", section 3.2).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Settings of the loss scale.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LossScaleConfig {
    /// A constant scale instead of the dynamic one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fixed: Option<f64>,
    /// The scale of the first step.
    pub initial: f64,
    /// Steps without overflow after which the scale grows.
    pub window: u64,
    /// What it grows and shrinks by.
    pub factor: f64,
    /// Overflows before the scale shrinks: the last of them shrinks it. Restored when the scale grows.
    pub hysteresis: u32,
    /// The scale never falls below this.
    pub minimum: f64,
    /// The scale never rises above this.
    pub maximum: f64,
}

impl Default for LossScaleConfig {
    fn default() -> Self {
        Self {
            fixed: None,
            initial: 65536.0,
            window: 1000,
            factor: 2.0,
            hysteresis: 2,
            minimum: 1.0,
            // Without a limit a run whose gradients are all zero would grow the scale to infinity.
            maximum: 16_777_216.0,
        }
    }
}

impl LossScaleConfig {
    /// Checks the ranges.
    ///
    /// # Errors
    /// The first setting out of range, with the range.
    pub fn validate(&self) -> Result<()> {
        let refuse = |key: &str, rule: &str, found: f64| {
            Err(Error::Config(format!("loss_scale.{key} must be {rule}, found {found}")))
        };
        if let Some(fixed) = self.fixed
            && !(fixed > 0.0 && fixed <= LIMIT)
        {
            return refuse("fixed", "above 0 and at most 2^100", fixed);
        }
        if !(self.minimum > 0.0 && self.minimum <= LIMIT) {
            return refuse("minimum", "above 0 and at most 2^100", self.minimum);
        }
        if !(self.maximum >= self.minimum && self.maximum <= LIMIT) {
            return refuse("maximum", "at least loss_scale.minimum and at most 2^100", self.maximum);
        }
        if !(self.initial >= self.minimum && self.initial <= self.maximum) {
            return refuse(
                "initial",
                &format!("from {} to {} (minimum and maximum)", self.minimum, self.maximum),
                self.initial,
            );
        }
        if !(self.factor > 1.0 && self.factor <= 65536.0) {
            return refuse("factor", "above 1 and at most 65536", self.factor);
        }
        if self.window == 0 {
            return refuse("window", "at least 1", 0.0);
        }
        if self.hysteresis == 0 {
            return refuse("hysteresis", "at least 1", 0.0);
        }
        Ok(())
    }
}

/// The scale must be finite in float32, and so must its product with a loss.
const LIMIT: f64 = (1u128 << 100) as f64;

/// What a checkpoint keeps of a [`LossScaler`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScaleState {
    /// The scale of the next step.
    pub scale: f64,
    /// Steps without overflow since the scale last changed or a gradient overflowed.
    pub good_steps: u64,
    /// Overflows left before the scale shrinks.
    pub hysteresis_left: u32,
}

/// What an update did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleChange {
    /// Nothing.
    Kept,
    /// The scale grew.
    Grown,
    /// An overflow was tolerated.
    Tolerated,
    /// An overflow lowered the scale.
    Lowered,
    /// An overflow at the smallest scale (or at a fixed one): a lower one is not allowed, so it is likely to come again.
    AtMinimum,
}

/// The loss scale over the steps of a run. The same on every rank, since all ranks agree on overflow.
#[derive(Debug, Clone, PartialEq)]
pub struct LossScaler {
    config: LossScaleConfig,
    state: LossScaleState,
}

impl LossScaler {
    /// A scaler at its first step.
    ///
    /// # Errors
    /// As [`LossScaleConfig::validate`].
    pub fn new(config: LossScaleConfig) -> Result<Self> {
        config.validate()?;
        let state = LossScaleState {
            scale: config.fixed.unwrap_or(config.initial),
            good_steps: 0,
            hysteresis_left: config.hysteresis,
        };
        Ok(Self { config, state })
    }

    /// The scale of this step, for the loss and for unscaling alike.
    pub fn scale(&self) -> f64 {
        self.state.scale
    }

    /// Ends a step: `overflow` is whether any gradient of any rank was not finite. Called last in a step, after every
    /// other use of [`LossScaler::scale`].
    pub fn update(&mut self, overflow: bool) -> ScaleChange {
        let Self { config, state } = self;
        if config.fixed.is_some() {
            return if overflow { ScaleChange::AtMinimum } else { ScaleChange::Kept };
        }
        if overflow {
            state.good_steps = 0;
            if state.hysteresis_left > 1 {
                state.hysteresis_left -= 1;
                return ScaleChange::Tolerated;
            }
            if state.scale <= config.minimum {
                return ScaleChange::AtMinimum;
            }
            state.scale = (state.scale / config.factor).max(config.minimum);
            return ScaleChange::Lowered;
        }
        state.good_steps += 1;
        if state.good_steps < config.window {
            return ScaleChange::Kept;
        }
        state.good_steps = 0;
        state.hysteresis_left = config.hysteresis;
        let grown = (state.scale * config.factor).min(config.maximum);
        if grown > state.scale {
            state.scale = grown;
            ScaleChange::Grown
        } else {
            ScaleChange::Kept
        }
    }

    /// What a checkpoint keeps.
    pub fn state(&self) -> LossScaleState {
        self.state
    }

    /// Continues from a checkpoint. Settings may have changed since; a fixed scale overrides the stored one, and a
    /// stored one outside the new limits moves to the nearer limit.
    ///
    /// # Errors
    /// A scale that is not a positive finite number.
    pub fn restore(&mut self, state: LossScaleState) -> Result<()> {
        if !(state.scale > 0.0 && state.scale.is_finite()) {
            return Err(Error::Input(format!(
                "the checkpoint's loss scale must be above 0 and finite, found {}",
                state.scale
            )));
        }
        let config = &self.config;
        self.state = LossScaleState {
            scale: config.fixed.unwrap_or_else(|| state.scale.clamp(config.minimum, config.maximum)),
            good_steps: state.good_steps,
            hysteresis_left: state.hysteresis_left.clamp(1, config.hysteresis),
        };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scaler(change: impl FnOnce(&mut LossScaleConfig)) -> LossScaler {
        let mut config = LossScaleConfig::default();
        change(&mut config);
        LossScaler::new(config).unwrap()
    }

    /// Runs a scaler through steps (`.` finite, `x` overflow) and compares the scales after each.
    fn check(mut scaler: LossScaler, steps: &str, expected: &[f64]) {
        let found: Vec<f64> = steps
            .chars()
            .map(|step| {
                scaler.update(step == 'x');
                scaler.scale()
            })
            .collect();
        assert_eq!(found, expected, "{steps}");
    }

    #[test]
    fn table() {
        let small = |window, hysteresis| {
            scaler(|c| {
                c.initial = 8.0;
                c.window = window;
                c.hysteresis = hysteresis;
                c.maximum = 32.0;
            })
        };
        // Grows at every step, up to the maximum.
        check(small(1, 2), "....", &[16.0, 32.0, 32.0, 32.0]);
        // The first overflow is tolerated, every further one shrinks.
        check(small(9, 2), "xxx.x", &[8.0, 4.0, 2.0, 2.0, 1.0]);
        // Growth restores the tolerance.
        check(small(2, 2), "x..xx", &[8.0, 8.0, 16.0, 16.0, 8.0]);
        // An overflow starts the window anew.
        check(small(3, 1), "..x...", &[8.0, 8.0, 4.0, 4.0, 4.0, 8.0]);
        // Never below the minimum.
        check(small(9, 1), "xxxxx", &[4.0, 2.0, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn defaults() {
        let mut s = scaler(|_| {});
        assert_eq!(s.scale(), 65536.0);
        assert!((0..999).all(|_| s.update(false) == ScaleChange::Kept));
        assert_eq!(s.update(false), ScaleChange::Grown);
        assert_eq!(s.scale(), 131072.0);
        assert_eq!(s.update(true), ScaleChange::Tolerated);
        assert_eq!(s.update(true), ScaleChange::Lowered);
    }

    #[test]
    fn reports_overflow_at_the_minimum_and_at_a_fixed_scale() {
        let mut s = scaler(|c| {
            c.initial = 1.0;
            c.hysteresis = 1;
        });
        assert_eq!(s.update(true), ScaleChange::AtMinimum);
        let mut s = scaler(|c| c.fixed = Some(128.0));
        assert_eq!(s.update(true), ScaleChange::AtMinimum);
        assert_eq!(s.update(false), ScaleChange::Kept);
        assert_eq!(s.scale(), 128.0);
    }

    #[test]
    fn a_restored_scaler_continues_as_if_it_had_never_stopped() {
        let steps = "..x.x....xx.x....";
        let make = || {
            scaler(|c| {
                c.window = 3;
            })
        };
        for cut in 0..steps.len() {
            let (mut whole, mut first, mut second) = (make(), make(), make());
            for (i, step) in steps.chars().enumerate() {
                if i == cut {
                    let json = serde_json::to_string(&first.state()).unwrap();
                    second.restore(serde_json::from_str(&json).unwrap()).unwrap();
                }
                let overflow = step == 'x';
                let expected = whole.update(overflow);
                let part = if i < cut { &mut first } else { &mut second };
                assert_eq!(part.update(overflow), expected);
                assert_eq!(part.state(), whole.state());
            }
        }
    }

    #[test]
    fn refuses_settings_out_of_range() {
        let cases: [(&str, fn(&mut LossScaleConfig)); 8] = [
            ("fixed", |c| c.fixed = Some(0.0)),
            ("fixed", |c| c.fixed = Some(f64::INFINITY)),
            ("minimum", |c| c.minimum = 0.0),
            ("maximum", |c| c.maximum = f64::NAN),
            ("initial", |c| c.initial = 0.5),
            ("factor", |c| c.factor = 1.0),
            ("window", |c| c.window = 0),
            ("hysteresis", |c| c.hysteresis = 0),
        ];
        for (key, change) in cases {
            let mut config = LossScaleConfig::default();
            change(&mut config);
            let message = LossScaler::new(config).unwrap_err().to_string();
            assert!(message.starts_with(&format!("loss_scale.{key} must be")), "{message}");
        }
    }

    #[test]
    fn a_damaged_state_is_refused_and_a_foreign_one_is_limited() {
        let mut s = scaler(|_| {});
        let state = |scale| LossScaleState { scale, good_steps: 0, hysteresis_left: 9 };
        assert!(s.restore(state(f64::NAN)).is_err());
        assert!(s.restore(state(-1.0)).is_err());
        s.restore(state(1e30)).unwrap();
        assert_eq!(s.scale(), 16_777_216.0);
        assert_eq!(s.state().hysteresis_left, 2);
    }
}
