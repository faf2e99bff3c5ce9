//! Drawing.

use std::fmt::{Display, Write};
use std::ops::Range;

use super::rows::{Segment, flatten, merge, without};
use super::{Label, Step, Timeline};
use crate::trace::Lane;
use crate::{Error, Result};

/// Bytes above which less is drawn apart.
const LIMIT: usize = 150_000;
/// The distance in pixels below which spans are drawn as one, and the largest that is tried.
const DISTANCES: Range<f64> = 0.5..33.0;

/// Sizes in pixels.
const WIDTH: f64 = 960.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = 18.0;
const TOP: f64 = 10.0;
const TITLE: f64 = 20.0;
const NUMBERS: f64 = 14.0;
const ROW: f64 = 18.0;
const BAR: f64 = 15.0;
const GAP: f64 = 14.0;
const AXIS: f64 = 42.0;
const LEGEND: f64 = 26.0;
/// Roughly the width of a character.
const CHARACTER: f64 = 5.8;

/// One run's part of the picture.
struct Panel<'a> {
    timeline: &'a Timeline,
    steps: &'a [Step],
    start: f64,
    end: f64,
    /// A row for each lane of the picture.
    rows: Vec<Vec<Segment>>,
}

/// Draws the `chosen` steps of each run.
pub(super) fn draw(timelines: &[Timeline], chosen: &[Range<usize>]) -> Result<String> {
    let mut panels = Vec::new();
    for (timeline, range) in timelines.iter().zip(chosen) {
        let steps = &timeline.steps[range.clone()];
        let (Some(first), Some(last)) = (steps.first(), steps.last()) else {
            return Err(Error::Input(format!("{}: no step to draw", timeline.title)));
        };
        let (start, end) = (first.start, last.end);
        let row = |lane| flatten(&timeline.spans, lane, start..end);
        let waits = row(Lane::Wait);
        let rows = Lane::ALL.map(|lane| match lane {
            // A span of the device goes on while it waits within it. What is drawn is work.
            Lane::Compute => without(&row(lane), &waits),
            _ => row(lane),
        });
        panels.push(Panel { timeline, steps, start, end, rows: rows.into() });
    }
    let span = panels.iter().map(|panel| panel.end - panel.start).fold(0.0, f64::max);
    if !(span.is_finite() && span > 0.0) {
        return Err(Error::Input("expected steps in which time passes; there is nothing to draw".into()));
    }
    let shown = |lane: &Lane| {
        matches!(lane, Lane::Compute | Lane::Wait) || panels.iter().any(|panel| !panel.rows[*lane as usize].is_empty())
    };
    let lanes: Vec<Lane> = Lane::ALL.into_iter().filter(shown).collect();
    let mut picture = Picture { lanes, scale: (WIDTH - LEFT - RIGHT) / span, span, distance: DISTANCES.start };
    loop {
        let text = picture.text(&panels);
        picture.distance *= 2.0;
        if text.len() < LIMIT || !DISTANCES.contains(&picture.distance) {
            return Ok(text);
        }
    }
}

struct Picture {
    lanes: Vec<Lane>,
    /// Pixels a second.
    scale: f64,
    /// Seconds from left to right.
    span: f64,
    /// In pixels.
    distance: f64,
}

impl Picture {
    fn text(&self, panels: &[Panel<'_>]) -> String {
        let panel_height = TITLE + NUMBERS + self.lanes.len() as f64 * ROW + GAP;
        let bottom = TOP + panel_height * panels.len() as f64;
        let height = bottom + AXIS + LEGEND;
        let titles: Vec<String> = panels.iter().map(|panel| escape(&panel.timeline.title)).collect();
        let mut out = Out::default();
        out.line(format_args!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
             font-family=\"sans-serif\" font-size=\"11\" fill=\"#333333\" role=\"img\" aria-label=\"Timeline of {}\">",
            titles.join(", ")
        ));
        out.line(format_args!(
            "<defs><pattern id=\"zf-wait\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\" \
             patternTransform=\"rotate(45)\"><rect width=\"5\" height=\"5\" fill=\"#fbd5d2\"/><rect width=\"2.2\" height=\"5\" \
             fill=\"#d3261d\"/></pattern></defs>"
        ));
        out.line(format_args!("<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>"));
        self.axis(&mut out, bottom);
        for (number, panel) in panels.iter().enumerate() {
            self.panel(&mut out, panel, &titles[number], TOP + panel_height * number as f64);
        }
        self.legend(&mut out, bottom + AXIS);
        out.line(format_args!("</svg>"));
        out.0
    }

    /// Pixels from the left, of seconds since a panel's beginning.
    fn x(&self, seconds: f64) -> f64 {
        LEFT + seconds * self.scale
    }

    fn axis(&self, out: &mut Out, bottom: f64) {
        let tick = tick(self.span / 9.0);
        let (unit, factor) = if self.span < 2.0 { ("ms", 1e3) } else { ("s", 1.0) };
        let decimals = (-(tick * factor).log10()).ceil().clamp(0.0, 6.0) as usize;
        let line = bottom - GAP / 2.0;
        let ticks = (self.span / tick * (1.0 + 1e-9)).floor() as u32;
        for number in 0..=ticks {
            let time = f64::from(number) * tick;
            let x = px(self.x(time));
            out.line(format_args!("<path d=\"M{x} {TOP}V{}\" stroke=\"#e4e4e4\"/>", line + 4.0));
            out.line(format_args!(
                "<text x=\"{x}\" y=\"{}\" text-anchor=\"middle\">{:.decimals$}</text>",
                line + 17.0,
                time * factor
            ));
        }
        out.line(format_args!("<path d=\"M{LEFT} {line}H{}\" stroke=\"#333333\"/>", WIDTH - RIGHT));
        out.line(format_args!(
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">time ({unit})</text>",
            px(LEFT + (WIDTH - LEFT - RIGHT) / 2.0),
            line + 33.0
        ));
    }

    fn panel(&self, out: &mut Out, panel: &Panel<'_>, title: &str, top: f64) {
        let length = panel.end - panel.start;
        let count = panel.steps.len();
        let idle = panel.timeline.seconds(Lane::Wait, panel.start..panel.end) / length.max(f64::MIN_POSITIVE);
        out.line(format_args!(
            "<text x=\"{LEFT}\" y=\"{}\" font-size=\"13\"><tspan font-weight=\"bold\">{title}</tspan><tspan dx=\"10\" \
             font-size=\"11\" fill=\"#666666\">{count} step{}, {} a step, device waits {:.1} %</tspan></text>",
            px(top + 13.0),
            if count == 1 { "" } else { "s" },
            duration(length / count as f64),
            idle * 100.0
        ));
        let rows = top + TITLE + NUMBERS;
        for (place, &lane) in self.lanes.iter().enumerate() {
            let y = rows + place as f64 * ROW;
            let middle = px(y + BAR / 2.0 + 4.0);
            let x = px(LEFT - 8.0);
            out.line(format_args!("<text x=\"{x}\" y=\"{middle}\" text-anchor=\"end\">{}</text>", lane.name()));
            self.row(out, panel, lane, y);
        }
        self.steps(out, panel, top + TITLE, rows + self.lanes.len() as f64 * ROW);
    }

    fn row(&self, out: &mut Out, panel: &Panel<'_>, lane: Lane, y: f64) {
        let segments = merge(&panel.rows[lane as usize], self.distance / self.scale);
        if segments.is_empty() {
            return;
        }
        let (fill, ink) = colours(lane);
        let mut texts = Out::default();
        out.line(format_args!("<g transform=\"translate(0 {})\" fill=\"{fill}\">", px(y)));
        for (index, segment) in segments.iter().enumerate() {
            let x = self.x(segment.start - panel.start);
            let next = segments.get(index + 1).map_or(f64::INFINITY, |next| self.x(next.start - panel.start));
            let mut width = ((segment.end - segment.start) * self.scale).max(0.5);
            // Neighbours that touch would look like one.
            if width > 3.0 && next - (x + width) < 0.5 {
                width -= 0.5;
            }
            let label = &panel.timeline.labels[segment.label];
            let time = duration(segment.end - segment.start);
            let (x, w) = (px(x), px(width));
            let title = tooltip(label, segment.more);
            out.line(format_args!(
                "<rect x=\"{x}\" width=\"{w}\" height=\"{BAR}\"><title>{title}, {time}</title></rect>"
            ));
            // On hatching nothing can be read.
            if lane != Lane::Wait && label.name.chars().count() as f64 * CHARACTER + 4.0 < width {
                texts.line(format_args!(
                    "<text x=\"{}\" y=\"{}\">{}</text>",
                    px(self.x(segment.start - panel.start) + width / 2.0),
                    BAR - 4.0,
                    escape(&label.name)
                ));
            }
        }
        if !texts.0.is_empty() {
            let inked = "font-size=\"10\" text-anchor=\"middle\" pointer-events=\"none\"";
            out.line(format_args!("<g fill=\"{ink}\" {inked}>\n{}</g>", texts.0));
        }
        out.line(format_args!("</g>"));
    }

    /// Lines where steps begin and end, and the numbers of as many steps as there is room for.
    fn steps(&self, out: &mut Out, panel: &Panel<'_>, top: f64, bottom: f64) {
        let mut lines = String::new();
        let (mut last_line, mut free) = (f64::NEG_INFINITY, f64::NEG_INFINITY);
        for step in panel.steps {
            let (x, end) = (self.x(step.start - panel.start), self.x(step.end - panel.start));
            if x - last_line >= 3.0 {
                lines.push_str(&format!("M{} {}V{}", px(x), px(top), px(bottom)));
                last_line = x;
            }
            let text = step.number.to_string();
            let half = text.len() as f64 * CHARACTER / 2.0 + 2.0;
            let middle = f64::midpoint(x, end);
            if middle - half >= free {
                let (x, y) = (px(middle), px(top + 10.0));
                out.line(format_args!("<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\">{text}</text>"));
                free = middle + half;
            }
        }
        let end = self.x(panel.end - panel.start);
        lines.push_str(&format!("M{} {}V{}", px(end), px(top), px(bottom)));
        out.line(format_args!(
            "<path class=\"steps\" d=\"{lines}\" stroke=\"#333333\" stroke-width=\"0.8\" fill=\"none\"/>"
        ));
    }

    fn legend(&self, out: &mut Out, y: f64) {
        let mut x = LEFT;
        let mut entry = |out: &mut Out, mark: &dyn Fn(f64) -> String, text: &str| {
            out.line(format_args!("{}<text x=\"{}\" y=\"{}\">{text}</text>", mark(x), px(x + 16.0), px(y + 10.0)));
            x += 16.0 + text.len() as f64 * CHARACTER + 22.0;
        };
        for &lane in &self.lanes {
            let fill = colours(lane).0;
            let mark =
                |x: f64| format!("<rect x=\"{}\" y=\"{}\" width=\"11\" height=\"11\" fill=\"{fill}\"/>", px(x), px(y));
            entry(out, &mark, lane.name());
        }
        let mark = |x: f64| format!("<path d=\"M{} {}v11\" stroke=\"#333333\"/>", px(x + 6.0), px(y));
        entry(out, &mark, "a step begins");
    }
}

/// Lines of text.
#[derive(Default)]
struct Out(String);

impl Out {
    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = writeln!(self.0, "{line}");
    }
}

/// Of the bars, and of what is written on them.
fn colours(lane: Lane) -> (&'static str, &'static str) {
    match lane {
        Lane::Compute => ("#2f6db5", "#ffffff"),
        Lane::Wait => ("url(#zf-wait)", "#333333"),
        Lane::Comm => ("#e6a93a", "#333333"),
        Lane::ToHost => ("#1f8a70", "#ffffff"),
        Lane::ToDevice => ("#7cc4ae", "#333333"),
        Lane::Host => ("#7b5ea7", "#ffffff"),
        Lane::Checkpoint => ("#8f8f8f", "#ffffff"),
    }
}

fn tooltip(label: &Label, more: usize) -> String {
    let mut text = escape(&label.name);
    if let Some(reason) = &label.reason {
        text.push_str(": ");
        text.push_str(&escape(reason));
    }
    if more > 0 {
        text.push_str(&format!(" and {more} more"));
    }
    text
}

/// Text as XML has it; characters that XML cannot hold are replaced.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\t' | '\n' | '\r' => out.push(' '),
            '\0'..='\u{1f}' | '\u{fffe}' | '\u{ffff}' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// A coordinate with at most one decimal.
fn px(value: f64) -> impl Display {
    (value * 10.0).round() / 10.0
}

/// Seconds for people.
fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.0} us", s * 1e6),
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

/// 1, 2 or 5 times a power of ten, at least `least`.
fn tick(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0].into_iter().map(|m| m * power).find(|&tick| least <= tick).unwrap_or(10.0 * power)
}
