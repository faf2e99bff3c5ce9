//! How long a window should be: from measured times, so that the host is done when its update is to become visible.
//!
//! With T_d the device's time for a step, u the host's for an update, a for adding up one step's gradients and t for bringing
//! gradients and parameters over the link, nobody waits where u + t + S a <= S T_d, so S = ceil((u + t) / (T_d - a)) (ZenFlow,
//! section 4). A longer window is not better: what is not chosen gets older. Its accumulated gradient, per element, should not
//! outgrow that of what is chosen.

use std::time::Instant;

use crate::stage::{HostWork, Traffic};

/// Weight of the newest value in a running mean.
const NEW: f64 = 0.2;

/// Measures one rank's windows.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// When the last update was made, and how long the device had waited by then.
    last: Option<(Instant, f64)>,
    /// The shortest step of the present window, without waiting.
    device: Option<f64>,
    /// What stood when the window began.
    before: Option<(HostWork, Traffic)>,
    /// The last complete window.
    window: Option<Window>,
    /// Running mean of the absolute gradient of chosen elements.
    chosen: Option<f64>,
    /// Whether a length was decided from measurements.
    decided: bool,
}

/// Figures of one window, seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Window {
    device: f64,
    update: f64,
    adding: f64,
    transfers: f64,
    /// Mean absolute value of the summed gradient of the host's elements; none where it was not taken.
    accumulated: Option<f64>,
    length: u64,
}

impl Pace {
    /// An update is about to be made; the device has waited for `waited` seconds in all.
    pub(super) fn step(&mut self, waited: f64) {
        let now = Instant::now();
        if let Some((last, before)) = self.last.replace((now, waited)) {
            let device = (now - last).as_secs_f64() - (waited - before);
            self.device = Some(self.device.map_or(device, |shortest| shortest.min(device)).max(1e-9));
        }
    }

    /// The mean absolute gradient of the chosen elements of a step.
    pub(super) fn chosen(&mut self, mean: f64) {
        self.chosen = Some(self.chosen.map_or(mean, |old| old + NEW * (mean - old)));
    }

    /// A window of `length` updates is complete, whose update is of `elements` elements. What the host takes for it is known by
    /// the element: it is rarely just done when a window ends. `at_once` says that gradients cross the link together, after the
    /// last of these updates, rather than after each.
    pub(super) fn end_window(&mut self, length: u64, elements: usize, at_once: bool, work: HostWork, traffic: Traffic) {
        let device = self.device.take();
        if let (Some((work_before, traffic_before)), Some(device)) = (self.before.replace((work, traffic)), device) {
            let updated = work.elements - work_before.elements;
            if updated == 0 {
                return;
            }
            let share = elements as f64 / updated as f64;
            let up = (traffic.busy_to_host - traffic_before.busy_to_host) / if at_once { 1.0 } else { length as f64 };
            let down = (traffic.busy_to_device - traffic_before.busy_to_device) * share;
            self.window = Some(Window {
                device,
                update: (work.updating - work_before.updating) * share,
                adding: (work.adding - work_before.adding) / length as f64,
                transfers: up + down,
                accumulated: Some((work.absolute - work_before.absolute) / updated as f64),
                length,
            });
        }
    }

    /// Whether there are measurements for the first time.
    pub(super) fn is_new(&self) -> bool {
        self.window.is_some() && !self.decided
    }

    /// A length was decided.
    pub(super) fn decided(&mut self) {
        self.decided = self.window.is_some();
    }

    /// The length that the last window suggests for those to come; none where nothing was measured.
    pub(super) fn suggest(&self, present: u64, at_most: u64, gradient_rule: bool) -> Option<u64> {
        let window = self.window.filter(|window| window.update > 0.0)?;
        let spare = window.device - window.adding;
        let hidden = if spare > 0.0 { ((window.update + window.transfers) / spare).ceil() } else { f64::INFINITY };
        let mut wanted = (hidden as u64).clamp(1, at_most);
        let accumulated = window.accumulated.filter(|accumulated| gradient_rule && *accumulated > 0.0);
        if let (Some(accumulated), Some(chosen)) = (accumulated, self.chosen) {
            let allowed = (window.length as f64 * chosen / accumulated).floor() as u64;
            wanted = wanted.min(allowed.max(1));
        }
        // Longer at once, shorter only where it is worth it, so that noise does not move it to and fro.
        Some(if wanted > present || wanted + 1 < present { wanted } else { present })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(update: f64, device: f64, adding: f64, accumulated: f64) -> Pace {
        let window = Window { device, update, adding, transfers: 1.0, accumulated: Some(accumulated), length: 4 };
        Pace { window: Some(window), chosen: Some(1.0), ..Pace::default() }
    }

    #[test]
    fn a_window_hides_the_host_and_no_more() {
        assert_eq!(Pace::default().suggest(4, 16, true), None, "nothing was measured");
        assert_eq!(window(6.5, 1.0, 0.0, 0.1).suggest(4, 16, true), Some(8));
        assert_eq!(window(6.5, 1.0, 0.25, 0.1).suggest(4, 16, true), Some(10), "adding takes time of the host too");
        assert_eq!(window(6.5, 1.0, 0.0, 0.1).suggest(4, 6, true), Some(6), "the bound");
        assert_eq!(window(6.5, 1.0, 2.0, 0.1).suggest(4, 16, true), Some(16), "the host cannot even add");
        assert_eq!(window(6.5, 1.0, 0.0, 0.8).suggest(4, 16, true), Some(5), "gradients grow old");
        assert_eq!(window(6.5, 1.0, 0.0, 0.8).suggest(4, 16, false), Some(8), "which may be disregarded");
        assert_eq!(window(6.5, 1.0, 0.0, 0.1).suggest(9, 16, true), Some(9), "one more is not worth a change");
        assert_eq!(window(6.5, 1.0, 0.0, 0.1).suggest(10, 16, true), Some(8));
    }
}
