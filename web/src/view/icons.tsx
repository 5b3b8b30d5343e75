// Icons, drawn in the colour of the text.

const PATHS = {
  menu: "M4 6h16M4 12h16M4 18h16",
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  sliders: "M4 8h9m5 0h2M4 16h3m5 0h8M15.5 5.5v5M9.5 13.5v5",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  again: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  forward: "M5 5l8 7-8 7zM14 5l6 7-6 7",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  left: "M15 6l-6 6 6 6",
  right: "M9 6l6 6-6 6",
  down: "M6 10l6 6 6-6",
  close: "M6 6l12 12M18 6L6 18",
  code: "M8 7l-5 5 5 5M16 7l5 5-5 5",
  columns: "M4 5h7v14H4zM13 5h7v14h-7z",
  attach: "M18 9l-7.5 7.5a2.5 2.5 0 0 1-3.5-3.5L15 5a4 4 0 0 1 5.7 5.6L12 19.3a5.5 5.5 0 0 1-7.8-7.8L11 4.7",
  link: "M10 14a4 4 0 0 0 6 0l3-3a4 4 0 0 0-6-6l-1 1M14 10a4 4 0 0 0-6 0l-3 3a4 4 0 0 0 6 6l1-1",
  chart: "M5 20V12M10 20V6M15 20v-9M20 20V9",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name }: { name: IconName }) {
  return (
    <svg class="icon" viewBox="0 0 24 24" aria-hidden="true">
      <path d={PATHS[name]} />
    </svg>
  );
}

interface IconButtonProps {
  icon: IconName;
  label: string; // its name, also shown as a tooltip
  onClick: () => void;
  pressed?: boolean;
  disabled?: boolean;
  class?: string;
  keys?: string;
}

export function IconButton({
  icon,
  label,
  onClick,
  pressed,
  disabled,
  keys,
  class: name = "",
}: IconButtonProps) {
  return (
    <button
      type="button"
      class={`icon-button ${name}`}
      aria-label={label}
      title={keys ? `${label} (${keys})` : label}
      aria-pressed={pressed}
      disabled={disabled}
      onClick={onClick}
    >
      <Icon name={icon} />
    </button>
  );
}
