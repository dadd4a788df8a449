//! Charts as SVG: lines over time or over a setting.

use std::io;
use std::ops::Range;
use std::path::Path;

use godwit_testkit::report::{Report, Runs};
use plotters::coord::ranged1d::ValueFormatter;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use serde_json::Value;

const SIZE: (u32, u32) = (900, 480);
/// Colours that are distinct for colour-blind readers, too.
const COLORS: [RGBColor; 5] = [
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(120, 120, 120),
    RGBColor(204, 121, 167),
];

#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) name: String,
    /// Points from left to right.
    pub(crate) points: Vec<(f64, f64)>,
}

#[derive(Clone, Debug)]
pub(crate) struct Chart {
    pub(crate) title: String,
    /// Label below the horizontal axis.
    pub(crate) x_label: String,
    /// Label beside the vertical axis.
    pub(crate) y_label: String,
    /// True if the vertical axis is logarithmic.
    pub(crate) logarithmic: bool,
    pub(crate) lines: Vec<Line>,
    /// Shaded ranges of the horizontal axis.
    pub(crate) shaded: Vec<Range<f64>>,
    /// Horizontal level line, with its name.
    pub(crate) level: Option<(f64, String)>,
}

impl Line {
    /// Returns a line for each value of the field `name`, with the medians of `figure` over the field `x`.
    pub(crate) fn over(runs: &Runs<'_>, name: &str, x: &str, figure: &str) -> Vec<Self> {
        let of = |runs: &Runs<'_>| {
            let groups = runs.groups(&[x]);
            let point = |group: &Runs<'_>| Some((group.first(x).as_f64()?, group.median(figure)?));
            let mut points: Vec<(f64, f64)> = groups.iter().filter_map(point).collect();
            points.sort_by(|one, two| one.0.total_cmp(&two.0));
            let name = runs.first(name).as_str().unwrap_or_default().to_owned();
            Self { name, points }
        };
        runs.groups(&[name]).iter().map(of).collect()
    }

    /// Returns a line from pairs of numbers in a report.
    pub(crate) fn of_pairs(name: &str, pairs: &Value) -> Self {
        let pairs = pairs.as_array().into_iter().flatten();
        Self {
            name: name.to_owned(),
            points: pairs
                .filter_map(|pair| Some((pair[0].as_f64()?, pair[1].as_f64()?)))
                .collect(),
        }
    }
}

impl Chart {
    /// Returns a chart with a linear axis.
    pub(crate) fn new(title: &str, x_label: &str, y_label: &str, lines: Vec<Line>) -> Self {
        Self {
            title: title.to_owned(),
            x_label: x_label.to_owned(),
            y_label: y_label.to_owned(),
            logarithmic: false,
            lines,
            shaded: Vec::new(),
            level: None,
        }
    }

    /// Makes the vertical axis logarithmic.
    pub(crate) fn logarithmic(mut self) -> Self {
        self.logarithmic = true;
        self
    }

    /// Writes the chart beside a report, if there is anything to draw, and names the file in the report.
    pub(crate) fn add(&self, report: &mut Report, file: &str) -> io::Result<()> {
        if self.lines.iter().all(|line| line.points.is_empty()) {
            return Ok(());
        }
        let path = report.dir().join(file);
        self.write(&path)?;
        report.notes.push(path.display().to_string());
        Ok(())
    }

    /// Writes the chart as SVG.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let root = SVGBackend::new(path, SIZE).into_drawing_area();
        let (x, y) = self.bounds()?;
        let mut builder = ChartBuilder::on(&root);
        builder
            .caption(&self.title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(60);
        let drawn = root.fill(&WHITE).and_then(|()| {
            if self.logarithmic {
                let mut chart = builder.build_cartesian_2d(x, y.clone().log_scale())?;
                self.draw(&mut chart, &y)
            } else {
                let mut chart = builder.build_cartesian_2d(x, y.clone())?;
                self.draw(&mut chart, &y)
            }?;
            root.present()
        });
        drawn.map_err(|error| io::Error::other(format!("cannot draw {}: {error}", path.display())))
    }

    fn bounds(&self) -> io::Result<(Range<f64>, Range<f64>)> {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let span = |values: &mut dyn Iterator<Item = f64>| {
            values.fold((f64::MAX, f64::MIN), |(low, high), value| {
                (low.min(value), high.max(value))
            })
        };
        if points().next().is_none() {
            return Err(io::Error::other(format!(
                "'{}' has nothing to draw",
                self.title
            )));
        }
        let (left, right) = span(&mut points().map(|point| point.0));
        let level = self.level.iter().map(|(level, _)| *level);
        let (low, high) = span(&mut points().map(|point| point.1).chain(level));
        let bottom = if self.logarithmic {
            low.max(1e-3) / 1.5
        } else {
            0.0
        };
        Ok((
            left..right.max(left + 1e-9),
            bottom..(high * 1.2).max(bottom + 1e-3),
        ))
    }

    fn draw<'a, 'b: 'a, Y>(
        &self,
        chart: &mut ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, Y>>,
        y: &Range<f64>,
    ) -> Result<(), DrawingAreaErrorKind<io::Error>>
    where
        Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        chart.draw_series(self.shaded.iter().map(|span| {
            Rectangle::new(
                [(span.start, y.start), (span.end, y.end)],
                BLACK.mix(0.08).filled(),
            )
        }))?;
        chart
            .configure_mesh()
            .x_desc(&self.x_label)
            .y_desc(&self.y_label)
            .light_line_style(TRANSPARENT)
            .draw()?;
        if let Some((level, name)) = &self.level {
            let across = [chart.x_range().start, chart.x_range().end].map(|x| (x, *level));
            chart
                .draw_series(LineSeries::new(across, BLACK.stroke_width(1)))?
                .label(name)
                .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], BLACK));
        }
        for (line, color) in self.lines.iter().zip(COLORS.iter().cycle()) {
            let style = color.stroke_width(2);
            chart
                .draw_series(LineSeries::new(line.points.iter().copied(), style).point_size(2))?
                .label(&line.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
        }
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .draw()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: Vec<(f64, f64)>) -> Chart {
        let name = "guest".to_owned();
        let chart = Chart::new("waiting", "s", "ms", vec![Line { name, points }]);
        Chart {
            shaded: vec![1.0..2.0],
            level: Some((5.0, "promise".to_owned())),
            ..chart
        }
    }

    #[test]
    fn what_is_drawn_is_in_the_file() {
        let dir = tempfile::tempdir().unwrap();
        for logarithmic in [false, true] {
            let path = dir.path().join(format!("{logarithmic}.svg"));
            let points = vec![(0.0, 1.0), (1.0, 80.0), (3.0, 2.0)];
            let chart = Chart {
                logarithmic,
                ..chart(points)
            };
            chart.write(&path).unwrap();
            let text = std::fs::read_to_string(path).unwrap();
            for word in ["waiting", "guest", "promise", "<polyline"] {
                assert!(text.contains(word), "{word}");
            }
        }
    }

    #[test]
    fn nothing_is_no_chart() {
        let dir = tempfile::tempdir().unwrap();
        let error = chart(Vec::new()).write(&dir.path().join("x.svg"));
        assert!(error.unwrap_err().to_string().contains("nothing to draw"));
    }
}
